"""The speed of this library, beside other libraries and hand-written code: `python -m benchmarks`."""
