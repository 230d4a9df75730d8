"""The settings of an HTTP client's integration."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import final

from resilience import checks
from resilience.integrations.http.perhost import PerHost, Policies
from resilience.integrations.http.rules import DEFAULT_RULES, Rules
from resilience.integrations.wire import Propagation
from resilience.policy import Policy, as_pipeline


@final
class Settings:
    """The arguments of an integration, checked once."""

    def __init__(
        self,
        policy: Policies,
        rules: Rules = DEFAULT_RULES,
        propagate_to: Propagation | Iterable[str] | None = (),
        read_body: bool = False,
    ) -> None:
        what = "a policy, or have one for each host, as standard() and PerHost(make) have"
        checks.instance("policy", policy, (Policy, PerHost), what)
        self.policies: Policies = policy if isinstance(policy, PerHost) else as_pipeline(policy)
        self.rules: Rules = checks.instance("rules", rules, Rules, "Rules")
        self.propagation: Propagation = Propagation.to(propagate_to)
        self.read_body: bool = checks.flag("read_body", read_body)
        self.client_is_closed: bool = False

    def close(self) -> Settings:
        """Mark the client as closed, so that its requests are not sent again. Return settings for later requests."""
        later = copy.copy(self)
        self.client_is_closed = True
        return later
