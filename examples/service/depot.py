"""The depot: the second service. It knows what is in stock, and it fails.

Look at the end of the constructor: the middleware opens the deadline that the caller has sent. With `cut_off=True`, the
work is cancelled at the deadline, because the caller has left.
"""

from __future__ import annotations

import enum
import time
from collections import Counter

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from resilience import current_context
from resilience.integrations.asgi import DeadlineMiddleware


class Mood(enum.Enum):
    """The current behaviour of the depot."""

    FAIR = "answers at once"
    FLAKY = "the first two requests for each item get a 503"
    HANGING = "the first request for each item gets no answer for seconds"
    SLOW = "answers after a moment"
    DOWN = "every request gets a 503"


class Depot:
    """An ASGI application that records its requests."""

    MOMENT = 0.12  # seconds
    HANG = 5.0

    def __init__(self) -> None:
        self.mood = Mood.FAIR
        self.requests = 0
        self.given: list[float] = []  # seconds left for each request; infinity if the caller sent no deadline
        self.worked: list[float] = []  # seconds spent on each request
        self.at_once = 0
        self.most_at_once = 0
        self._asked: Counter[str] = Counter()
        self.app = DeadlineMiddleware(Starlette(routes=[Route("/stock/{item}", self._stock)]), cut_off=True)

    async def _stock(self, request: Request) -> Response:
        began = time.monotonic()
        self.requests += 1
        self.given.append(current_context().remaining())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request.path_params["item"])
        finally:
            self.at_once -= 1
            self.worked.append(time.monotonic() - began)

    async def _answer(self, item: str) -> Response:
        self._asked[item] += 1
        asked = self._asked[item]
        if self.mood is Mood.DOWN or (self.mood is Mood.FLAKY and asked <= 2):
            return Response("out of order", status_code=503)
        if self.mood is Mood.HANGING and asked == 1:
            await anyio.sleep(self.HANG)
        if self.mood is Mood.SLOW:
            await anyio.sleep(self.MOMENT)
        return JSONResponse({"item": item, "left": 3 * len(item)})
