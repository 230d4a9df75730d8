"""How fast it is, side by side with other libraries and with hand-written code: `python -m benchmarks`."""
