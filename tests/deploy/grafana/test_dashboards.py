from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from tests.documents import ROOT
from tests.metrics_catalogue import catalogue, series_of
from tests.promql import metrics_in

DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
SERIES = series_of(catalogue())
COLUMNS = 24


def load(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dashboard


def parsed(query: str) -> Any:
    """A query with Grafana's variables filled in."""
    return promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$", ""))


def asked(query: str) -> set[str]:
    """The series that it asks for; fails where one is not there, or has not the labels."""
    names = set()
    for name, labels in metrics_in(parsed(query)):
        assert name in SERIES, f"{query}: there is no {name}"
        assert labels <= SERIES[name] | {"model"}, f"{query}: {name} has no {labels}"
        names.add(name)
    return names


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_there_are_four_and_their_names_differ() -> None:
    dashboards = [load(path) for path in DASHBOARDS]
    assert len(dashboards) == 4
    for field in ("uid", "title"):
        assert len({each[field] for each in dashboards}) == 4


def test_the_starter_has_a_dozen_panels_of_the_others() -> None:
    def panels(path: Path) -> list[dict[str, Any]]:
        return [{**panel, "id": 0, "gridPos": {}} for panel in load(path)["panels"]]

    starter = next(path for path in DASHBOARDS if path.stem == "starter")
    others = [panel for path in DASHBOARDS if path != starter for panel in panels(path)]
    assert len(panels(starter)) == 12
    assert [panel["title"] for panel in panels(starter) if panel not in others] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_can_import_it(path: Path) -> None:
    dashboard = load(path)
    assert re.fullmatch(r"[a-z0-9-]{1,40}", dashboard["uid"])
    assert dashboard["schemaVersion"] >= 36 and dashboard.get("id") is None
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS and place["h"] > 0
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat", "heatmap")
        assert panel["title"] and panel["datasource"] == source
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        assert all(target["datasource"] == source for target in panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, f"{one} and {other} overlap"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_asks_for_series_and_labels_that_there_are(path: Path) -> None:
    dashboard = load(path)
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    for query, legend in queries(dashboard):
        assert asked(query)
        used = {name for name in re.findall(r"\$(\w+)", query) if name != "__rate_interval"}
        assert used <= variables, f"{query} uses a variable that is not there"
        shown = set(re.findall(r"{{(\w+)}}", legend))
        kept = {label for _, labels in metrics_in(parsed(query)) for label in labels}
        assert shown <= kept | {"replica"}, f"{query} has nothing to show as {legend}"
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (name, label) = re.fullmatch(  # type: ignore[union-attr]
                r"label_values\((\w+), (\w+)\)", variable["definition"]
            ).groups()
            assert label in SERIES[name] | {"model"}
            assert variable["query"]["query"] == variable["definition"]


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {
        name for path in DASHBOARDS for query, _ in queries(load(path)) for name in asked(query)
    }
    missing = {
        name
        for name, family in catalogue().items()
        if (f"{name}_bucket" if family.kind == "histogram" else name) not in shown
    }
    assert not missing


@pytest.mark.parametrize(
    "query",
    [
        "sum(rate(sluice_request_total[1m]))",
        'sluice_replicas{stat="fresh"}',
        "sum by (class) (sluice_replicas)",
    ],
)
def test_the_check_sees_a_wrong_name_or_label(query: str) -> None:
    with pytest.raises(AssertionError):
        asked(query)
