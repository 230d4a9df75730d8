"""redis-py, blocking and asyncio: every command of a client under a policy, instead of redis-py's own retries.

redis-py calls its `Retry` object several times for one command: to connect, to send the command and read the answer,
and within that, to reconnect and to check the connection's health. If each call were an execution, attempts would be
squared, one failure would be counted twice, and a breaker would take every successful handshake for a recovery. So
one command is one execution, and everything from connecting to the last byte of the answer is one attempt: the pool
hands out connections that are not connected yet, and a function that redis-py wants to retry within an attempt runs
once.

If the answer does not arrive, the command may have been executed. It is repeated only if that does no harm: if
nothing was sent, or if executing it twice has the same effect and gives an equivalent answer.
"""

from resilience.integrations._extras import needed_by

with needed_by("redis"):
    from resilience.integrations.redis.commands import REPEATABLE_COMMANDS
    from resilience.integrations.redis.protection import protect
    from resilience.integrations.redis.retrying import AsyncPolicyRetry, OutcomeUnknown, PolicyRetry


__all__ = ["REPEATABLE_COMMANDS", "AsyncPolicyRetry", "OutcomeUnknown", "PolicyRetry", "protect"]
