"""Execute a Markdown page in an IPython kernel, as the cells of a notebook, and compare their output with the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.docs.run_page import Block, Broken, compare, through

_EXPECTED = re.compile(r"  # (->|raises) (.+)\n?\Z")


@contextmanager
def started(folder: Path) -> Iterator[Any]:
    """Start a kernel in this folder; yield its client."""
    from jupyter_client.manager import start_new_kernel  # here, because only slow tests have it

    manager, client = start_new_kernel(cwd=str(folder))
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(path: Path, name: str, folder: Path) -> None:
    """Run all Python blocks in one kernel; raise `Broken` if the output of one differs from the page."""

    def execute(block: Block) -> str:
        where, shown = f"{name}:{block.line}", cell(client, block.text)
        expected = _EXPECTED.search(block.text)
        kind, text = expected.groups() if expected else ("raises", "")
        if shown.get("raised", text) != text:
            raise Broken(f"{where}: {shown['raised']}")
        compare(where, text, shown.get("value" if kind == "->" else "raised", ""))
        return shown.get("printed", "")

    with started(folder) as client:
        cell(client, "import warnings; warnings.simplefilter('error')")
        through(path.read_text(encoding="utf-8"), name, execute)


def cell(client: Any, source: str) -> dict[str, str]:
    """Run a cell; return the text that it `printed`, its `value`, and the name of the error that it `raised`."""
    shown: dict[str, str] = {}

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            shown["printed"] = shown.get("printed", "") + content["text"]
        elif message["msg_type"] == "execute_result":
            shown["value"] = content["data"]["text/plain"]
        elif message["msg_type"] == "error":
            shown["raised"] = content["ename"]

    client.execute_interactive(source, output_hook=note, timeout=20)
    return shown
