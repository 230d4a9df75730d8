"""The policies: one module for each. They do not import one another."""
