"""The policies: one module each, which do not import one another."""
