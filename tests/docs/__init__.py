"""Tests of the documentation: each page, each example in a docstring, and each table of parameters."""
