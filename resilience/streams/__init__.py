"""Streams: unchanged policies around a generator or any other iterable, in threads and in tasks.

A stream is one call, which ends with its last item. The chain is a coroutine; the innermost stage opens the source, and
*suspends the whole chain with it*. A driver takes the items from the source, past the policies. When the source ends,
it resumes the chain, or throws into it the error that a pull raised. So a permit is held, and a probe runs, until the
stream ends; a Retry opens the source again; and an item costs the same under ten policies as under one.

    chain    yields an `Opened`: the pulls of a source, or of a value that a policy returns in its place
    pulls    yield the items, one after another
    driver   steps the pulls if there are any, and otherwise the chain. In tasks, both also yield what the event loop
             must wait for

    fails before an item      as any call: retried, counted, answered
    fails after an item       counted and raised. Not retried, because delivered items cannot be taken back, unless
                              `resume` tells the next call where to continue; never answered with another value
    closed by its consumer    a success if an item was delivered; otherwise no outcome
    cancelled in a pull       as any cancellation

No timer runs while the consumer has control (PEP 789). A `Timeout` is a deadline here, which cuts off a pull, or the
wait of a policy. The two limits of a stream, `first` and `idle`, are seconds for one pull.

A stream runs in its own context variables, a copy of those of its first pull. So values that policies and the source
set are kept from one pull to the next, and the consumer does not see them.
"""
