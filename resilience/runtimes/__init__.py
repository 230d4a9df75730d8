"""The runtimes of policies: blocking code in threads, and tasks under asyncio and trio."""
