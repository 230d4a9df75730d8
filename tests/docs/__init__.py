"""What is written for users: every page is executed, every docstring example, every table of parameters."""
