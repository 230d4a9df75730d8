"""Two services, and a deadline that goes from one to the other: `python -m examples.service`."""
