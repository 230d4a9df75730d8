"""Policies and deadlines for gRPC: interceptors for clients and servers, blocking and asyncio.

client.py    PolicyInterceptor, aio_interceptors: run the calls of a channel under a policy
server.py    DeadlineInterceptor, AioDeadlineInterceptor: apply the caller's deadline in a server
calls.py     one call: its deadline, its attempts, and the failure that policies see
answers.py   the objects that replace a call that was not made
"""

from resilience.integrations.extras import needed_by

with needed_by("grpc"):
    from resilience.integrations.grpc.client import PolicyInterceptor, aio_interceptors
    from resilience.integrations.grpc.server import AioDeadlineInterceptor, DeadlineInterceptor


__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor", "PolicyInterceptor", "aio_interceptors"]
