"""Leaves: one module for each third party, which the core never imports, each an optional extra of the same name."""
