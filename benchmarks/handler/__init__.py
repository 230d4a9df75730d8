"""A web handler that calls another service: the time of a request without policies, and with more and more of them.

`python -m benchmarks.handler` takes a minute or two. Each handler runs under uvicorn in its own process, and calls a
backend in another process through httpx. This process sends requests: through one connection to measure their time, and
through sixteen to measure the throughput. All handlers run at the same time, and are measured in turn, in a new random
order for each round; the tables show the median of the rounds.
"""
