"""Streams: every policy as it is, around a generator or whatever else brings items, in threads and in tasks.

A stream is one call that is not over before its last item. The chain is a coroutine; the innermost stage opens the
source and *suspends the whole chain with it*. A driver pulls the items from the source, past the policies, and then
sends the chain on, or throws into it what a pull raised. So a permit is held, and a probe is out, until the stream
ends; a Retry opens the source anew; and an item costs the same under ten policies as under one.

    failed before an item     as any call: retried, counted, answered
    failed after one          counted and raised. Not retried, as what was handed out cannot be taken back, unless
                              `resume` tells the next call where to go on; and no other value can stand in for it
    closed by its consumer    the call has ended well, if an item was handed out; before that it says nothing
    cancelled in a pull       as any cancellation

No timer runs while the consumer has the item (PEP 789). A `Timeout` is an instant here, which cuts off a pull, or
the wait of a policy. The two limits of a stream, `first` and `idle`, are seconds for one pull.

A stream runs in context variables of its own, a copy of those of its first pull. So what policies and the source set
there holds between two pulls, and the consumer sees none of it.
"""
