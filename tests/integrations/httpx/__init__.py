"""`resilience.integrations.httpx` against httpx and httpx2 themselves, in threads, asyncio and trio."""
