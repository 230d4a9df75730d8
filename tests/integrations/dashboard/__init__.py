"""The dashboard: as an ASGI application, served, and in a browser."""
