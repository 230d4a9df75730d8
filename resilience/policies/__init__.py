"""The policies: one module for each. They do not import one another. The other modules are parts of policies.

retry_state    of Retry
live_circuit   of CircuitBreaker, with `marks`
live_permits   of Bulkhead and AdaptiveLimit
latencies      of Hedge
rate           of RateLimiter
keys           of Keyed, SingleFlight and Cache
flights        of SingleFlight and Cache
copies         of SingleFlight, Cache and Retry
"""
