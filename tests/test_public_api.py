"""The public surface is recorded: a change of a name or signature is a change of `public_api.txt`, seen in review.

To update the record, run this file from the project's root:

    python -m tests.test_public_api
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import resilience
from resilience.checks import NoBlock

RECORD = Path(__file__).with_name("public_api.txt")
HOW = "if this is intended, update the record with `python -m tests.test_public_api`, and describe it in CHANGELOG.md"

#: Modules that users import from. For names that the front door re-exports, the record refers to their module.
PUBLIC = (
    *("resilience", "resilience.backoff", "resilience.errors", "resilience.events", "resilience.shared"),
    *("resilience.testing", "resilience.work"),
)
INTEGRATIONS = "resilience.integrations"

#: Classes that policies and blocks get without importing them.
HANDED_OUT = (
    "resilience.runtimes.base:Runtime",
    "resilience.runtimes.base:Timer",
    "resilience.runtimes.base:Plan",
    "resilience.runtimes.base:Waiter",
)
BLOCKS = (("Retry", "attempts", "__next__"), ("CircuitBreaker", "guard", None), ("Bulkhead", "slot", None))

OPERATORS = frozenset(
    "__call__ __or__ __iter__ __next__ __aiter__ __anext__ __enter__ __exit__ __aenter__ __aexit__".split()
)


def modules() -> Iterator[ModuleType]:
    """Yield every public module."""
    for name in PUBLIC:
        if exists(name):
            yield importlib.import_module(name)
    if not exists(INTEGRATIONS):
        return
    integrations = importlib.import_module(INTEGRATIONS)
    for info in pkgutil.iter_modules(integrations.__path__, f"{INTEGRATIONS}."):
        if not info.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(info.name)


def exists(name: str) -> bool:
    """Return whether the module exists; a folder without an `__init__` does not count."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def home_of(name: str) -> str:
    """Return the public module that defines a name of the front door, or an empty string if that is the front door."""
    found = getattr(resilience, name)
    others = (module for module in modules() if module is not resilience and name in module.__all__)
    return next((module.__name__ for module in others if getattr(module, name) is found), "")


def public_names(module: ModuleType) -> list[str]:
    """Return the names that `from module import *` imports."""
    return sorted(module.__all__)


def annotation(value: object) -> str:
    """Return an annotation as it was written."""
    if isinstance(value, str):
        return value
    if isinstance(value, typing.ForwardRef):
        return value.__forward_arg__
    return value.__name__ if isinstance(value, type) else str(value)


def signature(function: Any, *, drop_first: bool = False) -> str:
    """Return a signature with annotations as they were written, the same on every version of Python."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[1 if drop_first else 0 :]
    parts: list[str] = []
    kinds = [parameter.kind for parameter in parameters]
    for index, parameter in enumerate(parameters):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only and (index == 0 or kinds[index - 1] not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)):
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        parts.append(text)
        positional_only = parameter.kind is parameter.POSITIONAL_ONLY
        if positional_only and (index + 1 == len(kinds) or kinds[index + 1] is not parameter.POSITIONAL_ONLY):
            parts.append("/")
    result = "" if found.return_annotation is found.empty else f" -> {annotation(found.return_annotation)}"
    return f"({', '.join(parts)}){result}"


def default(value: object) -> str:
    """Return a default without addresses and paths."""
    if isinstance(value, ModuleType):
        return value.__name__
    if value is ...:
        return "..."
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__name__
    text = re.sub(r"frozenset\(\{(.*?)\}\)", lambda match: f"frozenset({sorted(match[1].split(', '))})", repr(value))
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def described(name: str, value: object) -> Iterator[str]:
    """Yield the lines that record one public name."""
    if isinstance(value, ModuleType):
        yield f"{name}: module"
    elif isinstance(value, type):
        yield from described_class(name, value)
    elif inspect.isroutine(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: a name for a type or value"


def described_class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in public_bases(kind)]
    marks = " final" if getattr(kind, "__final__", False) else ""
    yield f"class {name}({', '.join(bases)}){marks}" if bases else f"class {name}{marks}"
    if issubclass(kind, enum.Enum):
        for member in kind:
            yield f"    {member.name} = {member.value!r}"
        return
    made_here = any("__init__" in vars(ancestor) for ancestor in lineage(kind))
    if (made_here or dataclasses.is_dataclass(kind)) and not getattr(kind, "_is_protocol", False):
        for overload in typing.get_overloads(kind.__init__) or [kind.__init__]:  # type: ignore[misc]
            yield f"    {signature(overload, drop_first=True).removesuffix(' -> None')}"
    yield from described_members(kind)


def is_public(kind: type) -> bool:
    """Return whether a class belongs to another package, or can be imported from a public module."""
    if kind.__module__.partition(".")[0] != resilience.__name__:
        return True
    name = kind.__name__
    return any(getattr(module, name, None) is kind and name in module.__all__ for module in modules())


def public_bases(kind: type) -> Iterator[type]:
    """Yield the bases of a class, with those that are not public replaced by their own bases."""
    for base in kind.__bases__:
        if not is_public(base):
            yield from public_bases(base)
        elif base is not object:
            yield base


def lineage(kind: type) -> list[type]:
    """Return the class and those ancestors whose members are not already recorded for a public ancestor."""
    recorded = {ancestor for base in kind.__mro__[1:] if is_public(base) for ancestor in base.__mro__}
    return [kind, *(base for base in kind.__mro__[1:] if base not in recorded)]


def described_members(kind: type) -> Iterator[str]:
    recorded: set[str] = set()
    for owner in lineage(kind):
        annotations = inspect.get_annotations(owner)
        declared = {name for base in owner.__mro__[1:] for name in inspect.get_annotations(base)}
        recorded |= {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        for name in sorted({*vars(owner), *annotations} - recorded):
            if name.startswith("_") and name not in OPERATORS:
                continue
            member = vars(owner).get(name)
            if isinstance(member, NoBlock):
                continue  # there is no such method
            if name not in annotations and not callable(member) and name in declared:
                continue  # a value, or a slot, for what a parent declares
            recorded.add(name)
            yield from (f"    {line}" for line in described_member(name, member, annotations))


def described_member(name: str, member: Any, annotations: dict[str, Any]) -> Iterator[str]:
    if isinstance(member, (staticmethod, classmethod)):
        yield f"{type(member).__name__} .{name}{signature(member.__func__)}"
    elif inspect.isfunction(member := inspect.unwrap(member)):  # `wrap` checks how it is reached
        for overload in typing.get_overloads(member) or [member]:
            later = "async " if inspect.iscoroutinefunction(overload) else ""
            yield f"{later}.{name}{signature(overload, drop_first=True)}"
    elif isinstance(member, property):
        yield f".{name} -> {annotation(inspect.signature(member.fget).return_annotation)}"  # type: ignore[arg-type]
    elif name in annotations:
        yield f".{name}: {annotation(annotations[name])}"
    else:
        yield f".{name}"


def handed_out() -> Iterator[tuple[str, type]]:
    """Yield the classes that users meet without importing them."""
    for path in HANDED_OUT:
        module, _, name = path.partition(":")
        yield path.replace(":", "."), getattr(importlib.import_module(module), name)
    for policy, method, step in BLOCKS:
        made = getattr(resilience, policy)(*([1] if policy == "Bulkhead" else []))
        block = getattr(made, method)()
        yield f"resilience.{policy}.{method}()", type(block)
        if step is not None:
            with getattr(block, step)() as made:
                pass
            yield f"resilience.{policy}.{method}().{step}()", type(made)


def surface() -> str:
    """Return the whole public surface as text."""
    lines: list[str] = []
    for module in modules():
        lines += ["", f"# {module.__name__}", ""]
        for name in public_names(module):
            home = "" if module is not resilience else home_of(name)
            lines += [f"{name}: see {home}"] if home else described(name, getattr(module, name))
    lines += ["", "# handed out", ""]
    for name, kind in handed_out():
        lines += described_class(name, kind)
    return "\n".join(lines).lstrip() + "\n"


def test_the_public_surface_is_the_recorded_one() -> None:
    """So no name, signature or attribute changes by accident."""
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    now = surface().splitlines()
    changes = list(difflib.unified_diff(recorded, now, "recorded", "now", n=1, lineterm=""))
    assert not changes, "\n".join(["the public surface has changed:", *changes, HOW])


def test_every_public_module_has_a_correct_all() -> None:
    """Without duplicates, private names, or names that are a submodule's, too; every name exists; ruff sorts it."""
    for module in modules():
        assert len(module.__all__) == len(set(module.__all__)), module.__name__
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert not any(name.startswith("_") for name in module.__all__)
        submodules = {it.name for it in pkgutil.iter_modules(getattr(module, "__path__", ()))}
        assert [it for it in submodules & {*module.__all__} if not inspect.ismodule(getattr(module, it))] == []


def test_everything_public_has_a_docstring() -> None:
    """Each class, function, method and property."""
    missing = []
    for module in modules():
        for name in public_names(module):
            value = getattr(module, name)
            if isinstance(value, type) or inspect.isroutine(value):
                if not inspect.getdoc(value):
                    missing.append(f"{module.__name__}.{name}")
                if isinstance(value, type):
                    missing += [f"{name}.{member}" for member in undocumented(value)]
    assert missing == []


def undocumented(kind: type) -> list[str]:
    return [
        name
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, (property, staticmethod, classmethod)))
        and not inspect.getdoc(getattr(kind, name))
    ]


def test_importing_every_public_name_imports_only_declared_third_parties() -> None:
    """No client, integration or event loop backend: at most anyio and typing-extensions."""
    program = """
import json, sys
before = set(sys.modules)
from resilience import *
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    modules = json.loads(done.stdout)
    tops = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    assert tops - sys.stdlib_module_names <= {"resilience", "anyio", "typing_extensions"}
    assert [name for name in modules if name.startswith("resilience.integrations")] == []


if __name__ == "__main__":
    RECORD.write_text(surface(), encoding="utf-8")
    print(f"recorded {len(surface().splitlines())} lines in {RECORD}")
