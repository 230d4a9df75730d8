"""Pure state machines: they take the time as an argument, and use no clock, no I/O and no user code."""
