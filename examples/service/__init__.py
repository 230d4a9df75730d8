"""Two services, and a deadline that is passed from one to the other: `python -m examples.service`."""
