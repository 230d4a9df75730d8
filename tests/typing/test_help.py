"""What editors, `help()` and generated references show: the parameters and the docstring."""

from __future__ import annotations

import inspect
import json
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

import resilience
from resilience import Pipeline, Policy, Rate, Retry

ROOT = Path(__file__).parents[2]
PUBLIC: list[Any] = [getattr(resilience, name) for name in dir(resilience)]
CONSTRUCTORS = [it for it in PUBLIC if it is Rate or Policy in getattr(it, "__mro__", ())[1:]]


# --- at run time -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [Policy.wrap, Retry.wrap, Retry().wrap], ids=["Policy", "a class", "a policy"])
def test_wrap_has_the_parameters_of_the_pipeline_constructor_and_a_docstring(wrap: Any) -> None:
    """On the class of a policy, it checks its first policy, but to editors it is the same method."""
    assert (wrap.__name__, wrap.__qualname__) == ("wrap", "Policy.wrap")
    assert list(inspect.signature(wrap).parameters) == list(inspect.signature(Pipeline).parameters)
    assert str(inspect.signature(wrap)).startswith("(*policies: 'Policy[Any]', name: 'str | None' = None, listeners:")
    assert "Put policies around one another" in pydoc.plain(pydoc.render_doc(wrap))


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__name__)
def test_a_constructor_names_and_documents_each_parameter(constructor: type) -> None:
    """No `**kwargs`, no default with an address, and a line in the docstring for each parameter."""
    text = pydoc.plain(pydoc.render_doc(constructor))
    signature = inspect.signature(constructor)
    assert " object at 0x" not in str(signature)
    for parameter in signature.parameters.values():
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert f":param {parameter.name}: " in text


# --- in an editor ----------------------------------------------------------------------------

SOURCE = f'''
from resilience import Policy, current_context, {", ".join(it.__name__ for it in CONSTRUCTORS)}

@Fallback(None).wrap(Retry())
def fetch(url: str, *, times: int = 1) -> int:
    """Fetch a page."""
    return times

class Client:
    @Retry()
    async def get(self, url: str) -> int:
        """Fetch it later."""
        return 1
'''
#: Expressions, and what an editor must show for them: every parameter, then the beginning of the docstring.
SHOWN = {
    "Policy.wrap": "self b c d e f more name listeners: Put policies around one another",
    "Retry().wrap": "b c d e f more name listeners: Put policies around one another",
    **{
        it.__name__: f"{' '.join(inspect.signature(it).parameters)}: {(inspect.getdoc(it) or '')[:20]}"
        for it in CONSTRUCTORS
    },
    "fetch": "url times: Fetch a page.",
    "Client().get": "url: Fetch it later.",
}
#: Attributes, and the beginning of what an editor must show for them.
ATTRIBUTES = {
    "Retry().name": "The name of this policy",
    "Timeout.max_abandoned": "How many abandoned calls",
    "current_context().attempt": "1 for the first attempt",
    "current_context().deadline": "Instant on the process clock",
    "current_context().operation": "The name of the operation",
    "next(iter(Retry().attempts())).number": "1 for the first attempt",
    "CircuitBreaker().state": "The state of the circuit",
}


class Editor:
    """A minimal editor: a client of pyright's language server with one file."""

    def __init__(self, server: subprocess.Popen[bytes], folder: Path) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._to, self._from = server.stdin, server.stdout
        self._uri = (folder / "source.py").as_uri()
        self._asked = 0
        folders = [{"uri": folder.as_uri(), "name": "folder"}]
        self._ask("initialize", {"processId": None, "rootUri": None, "workspaceFolders": folders, "capabilities": {}})
        self._send("initialized", {})
        document = {"uri": self._uri, "languageId": "python", "version": 1, "text": ""}
        self._send("textDocument/didOpen", {"textDocument": document})

    def show(self, what: str, line: str, column: int) -> Any:
        """Return what the editor shows at this place of a line below the source."""
        text = {"text": f"{SOURCE}{line}\n"}
        document = {"uri": self._uri, "version": self._asked + 2}
        self._send("textDocument/didChange", {"textDocument": document, "contentChanges": [text]})
        place = {"line": SOURCE.count("\n"), "character": column}
        return self._ask(f"textDocument/{what}", {"textDocument": {"uri": self._uri}, "position": place})

    def close(self) -> None:
        """Let the server end."""
        self._ask("shutdown", None)
        self._send("exit", None)

    def _send(self, method: str, params: object, **more: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
        self._to.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._to.flush()

    def _ask(self, method: str, params: object) -> Any:
        self._asked += 1
        self._send(method, params, id=self._asked)
        while (message := self._receive()).get("id") != self._asked:
            pass  # a notification
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        length = 0
        while header := self._from.readline().strip():
            name, _, value = header.partition(b":")
            if name == b"Content-Length":
                length = int(value)
        message: dict[str, Any] = json.loads(self._from.read(length))
        return message


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    """Start a language server, which takes a second and then answers in milliseconds."""
    folder = tmp_path_factory.mktemp("editor")
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}), encoding="utf-8")
    command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        silence = Timer(120, server.stdin.close)  # ends a silent server, and then the wait for its answer
        silence.start()
        try:
            editor = Editor(server, folder)
            yield editor
            editor.close()
        finally:
            silence.cancel()


def names_in(signature: str) -> set[str]:
    """Return the names of the parameters of one or several signatures."""
    return set(re.findall(r"(?<![.\w])(\w+): ", signature))


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "shown"), SHOWN.items(), ids=SHOWN)
def test_hovering_shows_parameters_and_docstring(editor: Editor, expression: str, shown: str) -> None:
    """In pyright, and so in every editor that uses it."""
    text = editor.show("hover", expression, len(expression) - 1)["contents"]["value"]
    names, _, documentation = shown.partition(": ")
    signature, found, _ = text.partition(documentation)
    assert found, text
    assert names_in(signature) == set(names.split()), text


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "documentation"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_hovering_shows_the_docstring_of_an_attribute(editor: Editor, expression: str, documentation: str) -> None:
    """A docstring below it: editors do not read the comments above."""
    text = editor.show("hover", expression, len(expression) - 1)["contents"]["value"]
    assert documentation in text


@pytest.mark.slow
@pytest.mark.parametrize(("expression", "shown"), SHOWN.items(), ids=SHOWN)
def test_signature_help_shows_parameters_and_docstring(editor: Editor, expression: str, shown: str) -> None:
    """Inside the parentheses of a call."""
    signatures = editor.show("signatureHelp", f"{expression}()", len(expression) + 1)["signatures"]
    names, _, documentation = shown.partition(": ")
    assert names_in(" ".join(found["label"] for found in signatures)) == set(names.split())
    assert all(documentation in found["documentation"]["value"] for found in signatures)
