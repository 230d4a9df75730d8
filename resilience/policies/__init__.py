"""The policies: one room each, strangers to one another."""
