"""DB-API: which errors of a database may be gone at the next try, and units of work that are done again as a whole.

A statement is never repeated by itself. After a deadlock or a serialization failure the database has undone the whole
transaction, after a lost connection too; what was read in it may be different now. So what is repeated is the unit of
work: everything from a fresh connection to its commit.

One thing must not be repeated: a commit of which it is not known whether it happened. A connection that breaks during
`COMMIT` may break before the database has carried it out, or after. Such a failure is final, and so is a commit in
the middle of which a `Timeout` let the caller go.

units.py     unit_of_work: a transaction under a policy
errors.py    transient, sqlstate: what the error of a driver says
limits.py    StatementLimits: deadlines in the database
drivers.py   which driver it is
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
