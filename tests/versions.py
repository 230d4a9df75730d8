"""What older versions of other packages lack: `.ci/run oldest` tests with the oldest ones that are supported."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement


def is_installed(requirement: str) -> bool:
    """Whether the installed version of a package is one of these, such as `"openai>=3"`."""
    wanted = Requirement(requirement)
    return wanted.specifier.contains(version(wanted.name), prereleases=True)


def needs(requirement: str) -> pytest.MarkDecorator:
    """Skip a test, or a case of it, that uses what came with this version of a package."""
    return pytest.mark.skipif(not is_installed(requirement), reason=f"uses what came with {requirement}")
