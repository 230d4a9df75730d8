"""The worlds in which policies run: blocking code in threads, and tasks under asyncio and trio."""
