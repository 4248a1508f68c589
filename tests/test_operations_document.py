from __future__ import annotations

import json
import re
import shlex

import yaml

from sluice.deploy.config import SluiceConfig, parse_config
from tests.deploy.prometheus.test_prometheus import promtool
from tests.documents import ROOT, marked

OPERATIONS = ROOT / "docs" / "operations.md"
TEXT = OPERATIONS.read_text(encoding="utf-8")


def test_its_configurations_are_accepted() -> None:
    for text in marked(OPERATIONS, "check: config"):
        parse_config(yaml.safe_load(text))


def test_its_command_for_the_rules_works() -> None:
    (command,) = marked(OPERATIONS, "run: promtool")
    tool, *arguments = shlex.split(command)
    assert tool == "promtool"
    done = promtool(*arguments, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_panels_that_it_names_are_on_a_dashboard() -> None:
    titles = {
        panel["title"]
        for path in (ROOT / "deploy" / "grafana").glob("*.json")
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
    }
    named = {
        " ".join(name.split()) for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", TEXT)
    } - {"Critical"}
    assert named and named <= titles, named - titles


def test_the_settings_that_it_names_are_there() -> None:
    roots = set(SluiceConfig.model_fields)
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", TEXT))
    settings = {name for name in named if name.split(".")[0] in roots}
    assert len(settings) > 5
    schema = SluiceConfig.model_json_schema()
    for name in settings:
        node = schema
        for part in name.split("."):
            reference = node.get("$ref") or next(
                (each["$ref"] for each in node.get("anyOf", ()) if "$ref" in each), None
            )
            if reference:
                node = schema["$defs"][reference.rsplit("/", 1)[1]]
            assert part in node["properties"], name
            node = node["properties"][part]
