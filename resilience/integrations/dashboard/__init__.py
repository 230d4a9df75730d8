"""A page that shows the circuits, bulkheads, rates and last events of this process, live.

`Dashboard` is an ASGI application, to mount or to run by itself; `serve` runs it in a thread of its own, on the
loopback address. It is read-only: no request changes anything.
"""

from __future__ import annotations

from resilience.integrations.dashboard.app import Dashboard
from resilience.integrations.dashboard.server import Served, aserve, serve

__all__ = ["Dashboard", "Served", "aserve", "serve"]
