"""redis-py, sync and asyncio: every command of a client under a policy, in the place of redis-py's own retries.

redis-py asks its `Retry` object several times for one command: to connect, to send it and read the answer, and
inside of that, to connect again and to check the connection's health. Taken one by one, each would be an execution of
its own: attempts would be squared, one failure counted twice, and a breaker would take every successful handshake for
a recovery. So here one command is one execution, and one try of it, from connecting to the last byte of the answer,
is one attempt: the pool hands out connections that are not connected yet, and whatever a connection asks for inside
an attempt is done once.

A command whose answer does not come may have been carried out. It is repeated only where that does no harm: where
nothing had been sent, or where doing it twice has the same effect and gives the same answer.
"""

from resilience.integrations.extras import needed_by

with needed_by("redis"):
    from resilience.integrations.redis.commands import REPEATABLE_COMMANDS
    from resilience.integrations.redis.protection import protect
    from resilience.integrations.redis.retrying import AsyncPolicyRetry, OutcomeUnknown, PolicyRetry


__all__ = ["REPEATABLE_COMMANDS", "AsyncPolicyRetry", "OutcomeUnknown", "PolicyRetry", "protect"]
