"""The types of `wrap`, for type checkers alone: what a pipeline may answer is what any of its policies may.

Written out for up to six policies, because a checker joins the answers of a `*policies` to `object`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never, Protocol, overload

from typing_extensions import TypeVar

from resilience.info import Listener
from resilience.policy import Pipeline, Policy

A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
D_co = TypeVar("D_co", covariant=True)


class Wrap(Protocol[D_co]):
    """`a.wrap(b, c)`, where `a` answers `D_co`; and `Policy.wrap(a, b, c)`, where nothing does."""

    @overload
    def __call__(
        self,
        *more: Policy[Never],
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        e: Policy[E],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B | E]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        e: Policy[E],
        f: Policy[F],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B | E | F]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        e: Policy[E],
        f: Policy[F],
        g: Policy[G],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B | E | F | G]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        e: Policy[E],
        f: Policy[F],
        g: Policy[G],
        h: Policy[H],
        /,
        *,
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B | E | F | G | H]: ...
    @overload
    def __call__(
        self,
        a: Policy[A],
        b: Policy[B],
        e: Policy[E],
        f: Policy[F],
        g: Policy[G],
        /,
        *more: Policy[H],
        name: str | None = None,
        listeners: Iterable[Listener] = (),
    ) -> Pipeline[D_co | A | B | E | F | G | H]: ...
