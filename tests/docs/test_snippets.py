"""README and docs: every Python block runs, and its results are those that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs import run_page
from tests.docs.run_page import LANGUAGES, Broken, blocks, run

ROOT = Path(__file__).parents[2]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README = PAGES["README.md"]
BLOCKS = [block for page in PAGES.values() for block in blocks(page)]
#: A notebook needs a kernel, and arq cannot be installed with the extra `redis`: test_recipes.py runs both.
APART = ("docs/recipes/arq.md", "docs/recipes/notebooks.md")
#: The changelog has links, but nothing to run.
WRITTEN = {**PAGES, "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")}


def execute(path: Path, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page in a new Python process, in an empty folder, where a warning is an error."""
    command = [sys.executable, "-W", "error", run_page.__file__, str(path), name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=run_page.LIMIT + 10, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if name not in APART])
def test_the_blocks_of_a_page_have_the_results_it_shows(name: str, tmp_path: Path) -> None:
    """They run in order and in one namespace."""
    if name == "docs/gevent.md" and (sys.platform == "win32" or sys.implementation.name != "cpython"):
        pytest.skip("gevent is not available")
    done = execute(ROOT / name, name, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_pages_and_their_blocks_are_found() -> None:
    found = [block.language for block in BLOCKS]
    assert len(PAGES) >= 16
    assert found.count("python") >= 60
    assert set(found) <= LANGUAGES


def test_no_node_of_a_diagram_is_a_keyword_of_mermaid() -> None:
    """A flowchart with a bare `call -->` is shown as an error."""
    bare = re.compile(r"^\s*(call|click|end|href) +-|> +(call|click|end|href)\b(?![\[({])", re.MULTILINE)
    diagrams = [block.text for block in BLOCKS if block.language == "mermaid"]
    assert [diagram for diagram in diagrams if bare.search(diagram)] == []


def test_no_page_puts_a_bulkhead_inside_a_circuit_breaker() -> None:
    """Calls in its queue would reach a service whose circuit has opened meanwhile; docs/order.md has the numbers."""
    wrong = re.compile(r"\bCircuitBreaker(\([^()]*\))?,\s*(Adaptive|Bulkhead\b)")
    pages = [*PATHS, *sorted((ROOT / "examples").rglob("*.py"))]
    assert [str(path) for path in pages if wrong.search(path.read_text(encoding="utf-8"))] == []


# --- links -----------------------------------------------------------------------------------


def prose_of(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def test_no_line_of_a_sentence_is_taken_for_a_heading() -> None:
    """The site does so with a line that begins with `#`, such as that of an issue: GitHub needs a space after it."""
    texts = {name: prose_of(text) for name, text in WRITTEN.items()}
    assert [(it, line) for it in texts for line in re.findall(r"^#+[^# \n].*", texts[it], re.MULTILINE)] == []


def anchors(page: str) -> set[str]:
    """Return the anchors that a Markdown renderer gives to the headings of a page."""
    prose = prose_of(page)
    headings = re.findall(r"^#+ +(.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
#: `https://github.com/owner/name/blob/main/path#anchor`, and the same for raw files.
OURS = re.compile(
    rf"(?:{re.escape(SOURCE)}/(?:blob|tree)|{re.escape(SOURCE.replace('//github', '//raw.githubusercontent'))})"
    r"/main/([^)\s#]+)#?([^)\s]*)"
)
OTHERS = sorted(ROOT.glob(".github/**/*.md"))
FOR_CONTRIBUTORS = {it.relative_to(ROOT).as_posix(): it.read_text(encoding="utf-8") for it in OTHERS}


def dead_links(page: Path, text: str) -> list[str]:
    """Return the links to files of the project, or to headings in them, that do not exist."""
    relative = [it.partition("#")[::2] for it in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match("[a-z]+:", it)]
    links = [((page.parent / file).resolve() if file else page, anchor) for file, anchor in relative]
    links += [(ROOT / path, anchor) for path, anchor in OURS.findall(text)]
    alive = [it.exists() and (not anchor or anchor in anchors(it.read_text(encoding="utf-8"))) for it, anchor in links]
    return [f"{it}#{anchor}" for (it, anchor), is_alive in zip(links, alive, strict=True) if not is_alive]


@pytest.mark.parametrize("pages", [WRITTEN, FOR_CONTRIBUTORS], ids=["docs", "contributors"])
def test_links_name_existing_files_and_headings(pages: dict[str, str]) -> None:
    """Relative ones, and absolute ones into the repository: what is outside of `docs/` is not on the site."""
    assert pages
    assert {name: dead for name, text in pages.items() if (dead := dead_links(ROOT / name, text))} == {}


def test_links_into_the_repository_are_found() -> None:
    assert len(OURS.findall(README)) >= 30
    assert sum(len(OURS.findall(text)) for name, text in PAGES.items() if name != "README.md") >= 20


def test_the_index_links_to_every_page() -> None:
    pages = [name.removeprefix("docs/") for name in PAGES if name.startswith("docs/") and name != "docs/index.md"]
    assert [page for page in pages if f"]({page})" not in PAGES["docs/index.md"]] == []


@pytest.mark.parametrize(
    "answer", [r"own (retries|second try)|[Rr]etries (of|to|are|and)\b", r"[Tt]imeout|[Dd]eadline", r"[Tt]hread"]
)
def test_the_page_of_an_integration_covers_retries_timeouts_and_threads(answer: str) -> None:
    """Which retries to switch off, what limits the time, and what belongs to one thread."""
    pages = {name: text for name, text in PAGES.items() if name.startswith("docs/integrations/")}
    assert [name for name, text in pages.items() if not re.search(answer, text)] == []


def test_the_architecture_names_files_that_exist() -> None:
    """By their path in the package."""
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGES["docs/architecture.md"]))
    assert len(named) >= 30
    assert [name for name in sorted(named) if not (ROOT / "resilience" / name).exists()] == []


# --- the README ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marker", "command"),
    [
        ("run", ".venv/bin/python -m pip install -q -e '.[examples]' && .venv/bin/python examples/quickstart.py"),
        (
            "test",
            ".venv/bin/python -m pip install -q -e '.[test]' && .venv/bin/python -m pytest -q -n 4 --dist worksteal",
        ),
    ],
)
def test_the_readme_has_the_run_and_test_commands(marker: str, command: str) -> None:
    """Each alone in a shell block after its marker, with the setup of its environment."""
    found = re.findall(rf"^<!-- {marker} -->\n```shell\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found == [f"python3 -m venv .venv && {command}\n"]


def test_the_readme_says_how_long_the_tests_take() -> None:
    after = README.split("<!-- test -->")[1].split("```")[2]
    assert re.search(r"^The tests take about \w+ minutes on \w+", after.strip())


def test_the_first_example_of_the_readme_is_complete_and_short() -> None:
    """It has its own imports, and ten to fifteen lines."""
    first = blocks(README)[0]
    assert first.language == "python"
    assert 10 <= sum(bool(line.strip()) for line in first.text.splitlines()) <= 15


def test_the_readme_can_be_read_on_pypi() -> None:
    """Which shows it without other files, and a mermaid diagram as its source text."""
    defined = re.findall(r"^\[[^\]]+\]: (\S+)$", README, re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", README) + defined
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert len(defined) >= 30
    assert "mermaid" not in {block.language for block in blocks(README)}


def test_every_reference_of_the_readme_is_defined_and_used() -> None:
    used = set(re.findall(r"\]\[([^\]]+)\]", prose_of(README)))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", prose_of(README), re.MULTILINE))


# --- the runner of pages ---


def page_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text("\n".join(["# A page", "", *lines, ""]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("lines", "report"),
    [
        (["```python", "x = 1", "x + 1  # -> 3", "```"], "page.md:5: expected\n3\ngot\n2"),
        (["```python", "1 + 1", "1 / 0", "```"], "page.md:5: ZeroDivisionError: division by zero"),
        (["```python", "int('7')  # raises ValueError", "```"], "page.md:4: nothing was raised, ValueError"),
        (["```python", "int('x')  # raises KeyError", "```"], "page.md:4: expected\nKeyError\ngot\nValueError"),
        (["```python", "int('x')  # raises ValueError: other", "```"], "page.md:4: expected\nValueError: other"),
        (["```python", "print('a')", "```", "```text", "b", "```"], "page.md:7: expected\nb\ngot\na"),
        (["```python", "1", "```", "```text", "b", "```"], "page.md:7: expected\nb\ngot"),
        (["```python", "print('a')", "```"], "page.md:4: printed, but shown nowhere:\na"),
        (["```python", "print('a')", "```", "That is", "```text", "a", "```"], "page.md:4: printed, but shown nowhere"),
        (["```python", "x = 1  # -> 1", "```"], "page.md:4: no expression ends here"),
        (["```python", "def f(:", "```"], "page.md:4: invalid syntax"),
        (["```py", "1 / 0", "```"], "page.md:4: a block in 'py'"),
        (["```", "1 / 0", "```"], "page.md:4: a block in 'no language'"),
        (
            ["```python", "import asyncio", "async def main():", "    1  # -> 2", "asyncio.run(main())", "```"],
            "page.md:6: expected",
        ),
        (["```python", "def test_sum():", "    assert 1 > 2, 'no'", "```"], "page.md:5: AssertionError: no"),
        (["```python", "def f():", "    1  # -> 2", "```"], "page.md:5: this line was never reached"),
        (["```python", "def f():", "    raise KeyError('k')", "```", "", "```python", "f()", "```"], "page.md:5: Key"),
    ],
)
def test_a_wrong_result_on_a_page_is_reported_with_its_line(lines: list[str], report: str, tmp_path: Path) -> None:
    with pytest.raises(Broken) as caught:
        run(page_of(tmp_path, *lines), "page.md")
    assert str(caught.value).startswith(report)


@pytest.mark.parametrize(
    ("lines", "report"),
    [
        (["import warnings", "warnings.warn('old')"], "page.md:5: UserWarning: old"),
        (["async def f(): ...", "f()"], "coroutine 'f' was never awaited"),
        (["import threading", "t = threading.Thread(target=int, args='x')", "t.start()", "t.join()"], "ValueError"),
    ],
)
def test_warnings_and_unseen_exceptions_of_a_page_are_errors(lines: list[str], report: str, tmp_path: Path) -> None:
    """Coroutines that were not awaited, and exceptions in threads, among them."""
    done = execute(page_of(tmp_path, "```python", *lines, "```"), "page.md", tmp_path)
    assert done.returncode == 1
    assert report in done.stderr


def test_the_files_of_a_page_do_not_stay(tmp_path: Path) -> None:
    """So it can be run again, in a checkout, too."""
    page = page_of(tmp_path, "```python", "open('new', 'x').close()", "```")
    assert [execute(page, "page.md", tmp_path).returncode for _ in range(2)] == [0, 0]
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_that_hangs_is_stopped_and_the_line_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a limit on real time."""
    quick = tmp_path / "quick.py"
    source = Path(run_page.__file__).read_text(encoding="utf-8")
    quick.write_text(source.replace("LIMIT: Final = 100.0", "LIMIT: Final = 1.0"), encoding="utf-8")
    monkeypatch.setattr(run_page, "__file__", str(quick))
    done = execute(page_of(tmp_path, "```python", "import time", "time.sleep(60)", "```"), "page.md", tmp_path)
    assert done.returncode == 1
    assert '"page.md", line 5' in done.stderr
