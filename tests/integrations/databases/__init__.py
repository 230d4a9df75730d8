"""Units of work on real databases: SQLite files, and PostgreSQL where it is installed."""
