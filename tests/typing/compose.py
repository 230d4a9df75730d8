"""The types of a pipeline's answers, as type checkers see them. Read by test_types.py; not run."""

from __future__ import annotations

from typing import Any, Never, assert_type

from resilience import Context, Fallback, Pipeline, Policy, Retry, Timeout, events
from tests.typing.execute import fetch

A = Fallback(None)
B = Fallback(1)
C = Fallback(b"")


def answers_of_a_fallback() -> None:
    assert_type(Fallback(0).wrap(Retry(), Timeout(1.0)).execute(fetch), "str | int")
    assert_type(Fallback("").wrap(Retry()).execute(fetch), str)
    assert_type(Policy.wrap(Fallback(None), Retry(), Timeout(1.0)).execute(fetch), "str | None")


def one_to_eight_on_the_class() -> None:
    r, t = Retry(), Timeout(1.0)
    assert_type(Policy.wrap(A), Pipeline[None])
    assert_type(Policy.wrap(r, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, t, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, t, r, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, t, r, t, A), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, t, r, t, r, A), Pipeline[None])
    assert_type(Policy.wrap(A, r, t, r, t, r, t, r), Pipeline[None])
    assert_type(Policy.wrap(r, t, r, t, r, t, r, t), Pipeline[Never])


def one_to_eight_on_a_policy() -> None:
    r, t = Retry(), Timeout(1.0)
    assert_type(A.wrap(), Pipeline[None])
    assert_type(r.wrap(A), Pipeline[None])
    assert_type(r.wrap(t, A), Pipeline[None])
    assert_type(r.wrap(t, r, A), Pipeline[None])
    assert_type(r.wrap(t, r, t, A), Pipeline[None])
    assert_type(r.wrap(t, r, t, r, A), Pipeline[None])
    assert_type(r.wrap(t, r, t, r, t, A), Pipeline[None])
    assert_type(r.wrap(t, r, t, r, t, r, A), Pipeline[None])
    assert_type(A.wrap(r, t, r, t, r, t, r), Pipeline[None])
    assert_type(r.wrap(t, r, t, r, t, r, t), Pipeline[Never])


def the_constructor() -> None:
    r, t = Retry(), Timeout(1.0)
    assert_type(Pipeline(r), Pipeline[Never])
    assert_type(Pipeline(r, t, r, t, r, t, r, t), Pipeline[Never])
    assert_type(Pipeline(A), Pipeline[None])
    assert_type(Pipeline(A, r, t), Pipeline[None])
    assert_type(Pipeline(r, t, Fallback(None)), Pipeline[None])
    assert_type(Pipeline(r, A.wrap(t)).execute(fetch), "str | None")
    assert_type(Pipeline(r).wrap(A, B), Pipeline[None | int])
    assert_type(Pipeline(r, t, name="users", listeners=[print]).policies, tuple[Policy[Any], ...])
    several: Pipeline[int | bytes] = Pipeline(B, r, C)  # without a type, mypy would say `object`
    assert_type(several.execute(fetch), "str | int | bytes")


def several_answers() -> None:
    assert_type(A.wrap(Retry(), B, C).execute(fetch), "str | None | int | bytes")
    assert_type(Policy.wrap(A, B, C).execute(fetch), "str | None | int | bytes")
    assert_type(A.wrap(B).wrap(C).execute(fetch), "str | None | int | bytes")
    assert_type(Policy.wrap(B, Retry(), Retry(), Retry(), Retry(), C), Pipeline[int | bytes])
    assert_type(B.wrap(Retry(), Retry(), Retry(), Retry(), C, Retry(), Retry()), Pipeline[int | bytes])
    assert_type(A.wrap(Retry().wrap(B)).execute(fetch), "str | None | int")
    assert_type(Retry().wrap(A.wrap(Timeout(1.0))).execute(fetch), "str | None")


def names_and_listeners() -> None:
    def listener(event: events.RetryScheduled) -> None:
        print(event.delay)

    assert_type(Retry().wrap(Timeout(1.0), name="users", listeners=[listener]), Pipeline[Never])
    assert_type(Policy.wrap(A, Retry(), name="users", listeners=(listener, print)), Pipeline[None])
    assert_type(A.wrap(name="users").name, str)
    assert_type(A.wrap().describe(), str)


def a_policy_is_covariant() -> None:
    pipeline: Pipeline[None] = A.wrap(Retry())
    policy: Policy[Never] = Retry().wrap(Timeout(1.0))
    takes_a_wider_one(pipeline)
    takes_a_wider_one(policy)
    takes_a_wider_one(Retry())
    takes_a_wider_one(Fallback(None))
    several: list[Policy[None]] = [A, Retry(), Timeout(1.0)]
    assert_type(Policy.wrap(*several), Pipeline[None])


def takes_a_wider_one(policy: Policy[int | None]) -> None:
    assert_type(policy.execute(fetch), "str | int | None")


def own(ctx: Context) -> None:
    assert_type(Policy.wrap(Fallback(ctx), Retry()).execute(fetch), "str | Context")
