"""Policies and deadlines for gRPC: interceptors for clients and servers, blocking and asyncio.

client.py    PolicyInterceptor: calls of a blocking channel under a policy
aio.py       aio_interceptors: the same for a channel of grpc.aio
server.py    DeadlineInterceptor, AioDeadlineInterceptor: the caller's deadline in a server
calls.py     what the two clients share: how a call is limited, and how its failure is seen
"""

from resilience.integrations.grpc.aio import aio_interceptors
from resilience.integrations.grpc.client import PolicyInterceptor
from resilience.integrations.grpc.server import AioDeadlineInterceptor, DeadlineInterceptor

__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor", "PolicyInterceptor", "aio_interceptors"]
