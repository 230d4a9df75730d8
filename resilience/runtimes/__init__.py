"""The runtimes of policies: blocking code in threads, and tasks under asyncio and trio.

base       what policies may await: the interface of a runtime, of its timers and waiters
blocking   threads; `workers` run the functions that a timer may cut off
tasks      asyncio and trio; `alarms` are the timers of asyncio, and `current` finds the current task
engine     coroutines without an event loop: a simulation, or a race in threads
races/     several attempts at once
driving    runs a coroutine that never suspends; `lowering` makes such a coroutine a function
"""
