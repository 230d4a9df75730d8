"""Policies and deadlines for gRPC: interceptors for clients and servers, blocking and asyncio."""

from resilience.integrations._extras import needed_by

with needed_by("grpc"):
    from resilience.integrations.grpc.client import PolicyInterceptor, aio_interceptors
    from resilience.integrations.grpc.server import AioDeadlineInterceptor, DeadlineInterceptor


__all__ = ["AioDeadlineInterceptor", "DeadlineInterceptor", "PolicyInterceptor", "aio_interceptors"]
