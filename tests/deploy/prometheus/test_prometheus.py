from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.documents import ROOT, section
from tests.lacking import lacking
from tests.metrics_catalogue import catalogue, series_of
from tests.promql import metrics_in

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text(encoding="utf-8"))
CASES = Path(__file__).with_name("alerts_test.yaml")
OPERATIONS = ROOT / "docs" / "operations.md"


DOCS = "https://sluice.example.com/docs"
"""What stands in the rules for the place of the documents."""


def rules(kind: str) -> dict[str, dict[str, Any]]:
    return {
        rule[kind]: rule for group in RULES["groups"] for rule in group["rules"] if kind in rule
    }


ALERTS = rules("alert")


def promtool(*arguments: str, folder: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("promtool")
    if tool is None:
        lacking("promtool is missing: install the Debian package prometheus")
    return subprocess.run(
        [tool, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_rules_are_rules() -> None:
    done = promtool("check", "rules", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", [ROOT, PROMETHEUS])
def test_the_scrape_configuration_is_valid_as_it_is_shipped(folder: Path) -> None:
    file = (PROMETHEUS / "prometheus.yaml").relative_to(folder)
    done = promtool("check", "config", str(file), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout + done.stderr


def test_the_scrape_configuration_is_valid_with_a_key(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.yaml").read_text(encoding="utf-8")
    text, uncommented = re.subn(r"# (authorization:|  type:|  credentials_file:)", r"\1", text)
    assert uncommented == 3
    (key_file,) = re.findall(r"credentials_file: (\S+)", text)
    (tmp_path / "key").write_text("k" * 32)
    (tmp_path / "prometheus.yaml").write_text(text.replace(key_file, str(tmp_path / "key")))
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": key_file}
    shutil.copy(PROMETHEUS / "alerts.yaml", tmp_path)
    done = promtool("check", "config", "prometheus.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path) -> None:
    """The cases run against the rules, whose texts for people are left out."""
    groups = [
        {**group, "rules": [{**rule, "annotations": {}} for rule in group["rules"]]}
        for group in RULES["groups"]
    ]
    for rule in (rule for group in groups for rule in group["rules"]):
        del rule["annotations"]  # recording rules may not have any
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": groups}))
    shutil.copy(CASES, tmp_path)
    done = promtool("test", "rules", CASES.name, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_of_either_kind() -> None:
    told = [
        (check["alertname"], bool(check["exp_alerts"]))
        for case in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
        for check in case["alert_rule_test"]
    ]
    assert set(told) == {(alert, fires) for alert in ALERTS for fires in (True, False)}


def test_the_rules_ask_for_series_that_there_are() -> None:
    series = series_of(catalogue())
    for recorded in rules("record"):
        # What a recording rule makes: the labels that it keeps, if any.
        series[recorded] = frozenset({"class"} if "ratio" in recorded else ())
    for group in RULES["groups"]:
        for rule in group["rules"]:
            for name, labels in metrics_in(promql_parser.parse(rule["expr"])):
                assert name in series, f"{rule}: there is no {name}"
                assert labels <= series[name] | {"model"}, f"{rule}: {name} has no {labels}"


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_section_in_the_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["annotations"]["runbook_url"] == f"{DOCS}/operations.md#{alert.lower()}"
    assert rule["labels"]["severity"] in ("critical", "warning")
    text = section(OPERATIONS, alert)
    for part in ("Meaning", "Check", "Action"):
        assert f"**{part}.**" in text, f"{alert} does not say: {part}"


def test_the_runbook_has_no_section_of_an_alert_that_is_not_there() -> None:
    headings = re.findall(r"^#+ (Sluice\w+)$", OPERATIONS.read_text("utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)
