"""DB-API: which errors of a database are transient, and units of work that are repeated as a whole.

A statement is never repeated by itself. After a deadlock, a serialization failure or a lost connection, the database
has rolled back the whole transaction, and the data that it read may have changed. So the unit of work is repeated:
everything from a new connection to the commit.

A commit with an unknown outcome is not repeated. If a connection breaks during `COMMIT`, the database may or may not
have committed. Such a failure is final, and so is a commit that a `Timeout` cut off.
"""

from resilience.integrations.dbapi.errors import OutcomeUnknown, TransactionAborted, sqlstate, transient
from resilience.integrations.dbapi.limits import StatementLimits
from resilience.integrations.dbapi.units import UnitOfWork, unit_of_work

__all__ = [
    "OutcomeUnknown",
    "StatementLimits",
    "TransactionAborted",
    "UnitOfWork",
    "sqlstate",
    "transient",
    "unit_of_work",
]
