"""The page on migrating: each row runs the original library and ours side by side."""
