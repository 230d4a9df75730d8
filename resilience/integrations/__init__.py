"""Leaves: one module for each third party, imported by nobody here, each an optional extra of the same name."""
