"""Policies and deadlines for gRPC: interceptors for clients and servers, blocking and asyncio.

client.py    PolicyInterceptor, aio_interceptors: the calls of a channel under a policy
server.py    DeadlineInterceptor, AioDeadlineInterceptor: the caller's deadline in a server
calls.py     one call: how it is limited, repeated, and how its failure is seen
answers.py   what stands in the place of a call that was not made
"""

from resilience.integrations.extras import needed_by

with needed_by("grpc"):
    from resilience.integrations.grpc.client import PolicyInterceptor, aio_interceptors
    from resilience.integrations.grpc.server import AioDeadlineInterceptor, DeadlineInterceptor


__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor", "PolicyInterceptor", "aio_interceptors"]
