"""The Grafana dashboard shows the metrics of `prometheus.py`, and its picture shows the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from resilience.integrations.telemetry import INSTRUMENTS, Instrument

FOLDER = Path(__file__).parents[2] / "docs" / "integrations" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "resilience.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
#: The alerts of the page: the name of each, and its query.
PAGE = (FOLDER.parent / "prometheus.md").read_text(encoding="utf-8")
ALERTS = re.findall(r"- alert: (\w+).*?expr: (.*?)\n +for: \d+m", PAGE, re.DOTALL)
VARIABLES = {it["name"]: it for it in DASHBOARD["templating"]["list"]}


def exported(it: Instrument) -> set[str]:
    """The names of the series of an instrument."""
    name = it.name.replace(".", "_") + ("_seconds" if it.unit == "s" else "")
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
    return {name + suffix for suffix in suffixes[it.kind]}


SERIES = {name: it for it in INSTRUMENTS for name in exported(it)}


@pytest.mark.parametrize(("title", "query"), [*QUERIES, *ALERTS, ("$pipeline", VARIABLES["pipeline"]["definition"])])
def test_every_metric_of_a_query_is_exported(title: str, query: str) -> None:
    """With the labels by which it is selected and grouped."""
    names = re.findall(r"resilience_\w+", query)
    assert names
    assert set(names) <= set(SERIES)
    for name, selector in re.findall(r"(resilience_\w+)\{(.*?)\}", query):
        assert set(re.findall(r"(\w+)=", selector)) <= set(SERIES[name].labels)
    for by in re.findall(r"by \((.*?)\)", query):
        for name in names:
            assert set(by.split(", ")) - {"le"} <= set(SERIES[name].labels)


def test_the_page_has_alerts() -> None:
    """A gauge of circuits counts those in a state: with several hosts, more than one may be open."""
    assert len(ALERTS) == 4
    assert [query for _, query in ALERTS if "circuit_state" in query and not query.endswith("> 0")] == []


def test_the_circuits_of_several_hosts_and_processes_show_the_worst_state() -> None:
    """The gauge counts circuits with the same labels: three open ones must not add up to another state."""
    queries = [query for _, query in QUERIES if "circuit_state" in query]
    assert queries
    for query in queries:
        assert query.count("resilience_circuit_state") == query.count("clamp_max(resilience_circuit_state")
        assert " + " not in query


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_obeys_the_variables(title: str, query: str) -> None:
    """The choice of pipelines applies to every panel whose metrics have that label; brackets are closed."""
    for name, rest in re.findall(r"(resilience_\w+)(.?)", query):
        if "pipeline" in SERIES[name].labels:
            assert rest == "{", f"{name} is not selected by pipeline"
    for selector in re.findall(r"\{(.*?)\}", query):
        assert 'pipeline=~"$pipeline"' in selector
    assert [query.count(it) for it in "([{"] == [query.count(it) for it in ")]}"]


def test_every_instrument_has_a_panel_or_is_listed_here() -> None:
    shown = {SERIES[name] for _, query in QUERIES for name in re.findall(r"resilience_\w+", query)}
    assert {it.name for it in set(INSTRUMENTS) - shown} == {
        "resilience.cache.size",
        "resilience.circuit.transitions",
        "resilience.keyed.keys",
        "resilience.stream.items",
        "resilience.supervisor.parked",  # of no pipeline, and rare: for an alert
    }


def test_legends_name_labels_of_their_query() -> None:
    """A label that a query sums away would be empty in its legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = {name for by in re.findall(r"by \((.*?)\)", target["expr"]) for name in by.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped


def test_the_dashboard_has_the_fields_that_grafana_requires() -> None:
    """Variables for the data source and the pipeline; panels with distinct ids that do not overlap."""
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "timezone", "version"} <= set(DASHBOARD)
    assert DASHBOARD.get("id") is None, "the id is assigned at the import"
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")
    assert (VARIABLES["pipeline"]["multi"], VARIABLES["pipeline"]["includeAll"]) == (True, True)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = set()
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["description"].endswith(".")
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        width, height = range(place["w"]), range(place["h"])
        cells = {(place["x"] + x, place["y"] + y) for x in width for y in height}
        assert not cells & places
        places |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_the_picture_shows_the_panels() -> None:
    """It is drawn again after a change of the dashboard."""
    picture = (FOLDER / "resilience.svg").read_text(encoding="utf-8")
    titles = re.findall(r'font-weight="600">(.*?)</text>', picture)
    assert titles == [panel["title"] for panel in PANELS]
