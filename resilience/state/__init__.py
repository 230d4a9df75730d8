"""Pure machines: they take the time as an argument, and know no clock, no I/O and no user code."""
