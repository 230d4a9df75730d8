"""A web handler that calls another service: what a request takes with nothing, and with more and more of what we have.

`python -m benchmarks.handler` takes a minute or two. A handler runs in a process of its own under uvicorn, and calls a
backend in another one through httpx; this process asks it, by one connection for the time of a request, and by sixteen
for how many a second it gets through. All handlers are up at once, and asked in turn, in an order shuffled anew for
each round; the tables show the median of the rounds.
"""
