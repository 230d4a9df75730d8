"""Tools for tests of code that uses this library: virtual time, scripted functions, recorded events, modes.

>>> from resilience import Retry, Timeout
>>> from resilience.testing import hang, script, virtual_time
>>> fetch = script(hang(60), "fine")
>>> with virtual_time() as clock:
...     Retry(on=TimeoutError, backoff=[3600]).wrap(Timeout(5)).call(fetch)
'fine'
>>> clock.now()
3605.0
"""

from resilience.testing.clocks import VirtualClock
from resilience.testing.configuration import as_data
from resilience.testing.modes import no_sleeping, seeded, switched_off
from resilience.testing.recorder import Recorder, recording
from resilience.testing.scripts import AsyncScript, Call, Hang, Items, Script, ScriptEnded, ascript, hang, items, script
from resilience.testing.simulation import Simulation
from resilience.testing.virtual import virtual_time

__all__ = [
    "AsyncScript",
    "Call",
    "Hang",
    "Items",
    "Recorder",
    "Script",
    "ScriptEnded",
    "Simulation",
    "VirtualClock",
    "as_data",
    "ascript",
    "hang",
    "items",
    "no_sleeping",
    "recording",
    "script",
    "seeded",
    "switched_off",
    "virtual_time",
]
