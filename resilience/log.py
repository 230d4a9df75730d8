"""The logger of the library: of what no caller gets, such as the error of a listener, or of closing a resource."""

from __future__ import annotations

import logging

logger: logging.Logger = logging.getLogger("resilience")
