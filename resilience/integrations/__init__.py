"""Integrations: one for each third-party package, an optional extra of the same name. The core imports none of them."""
