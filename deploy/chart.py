"""The parts of the Helm chart that follow from the code, and its package.

``python -m sluice.deploy.chart`` writes the former into ``helm/sluice``; with ``--package
FOLDER`` it writes the chart as it is installed, with alert rules and dashboards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from sluice.deploy.config import SluiceConfig
from sluice.deploy.ray_start import TUNED

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "sluice"
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- /values -->)", re.DOTALL)


def contents() -> dict[Path, str]:
    """The content of every generated file of the chart, by path."""
    schema = values_schema()
    readme = CHART / "README.md"
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        readme: _TABLE.sub(lambda _: values_table(schema), readme.read_text(encoding="utf-8")),
        CHART / "files" / "ray-env.yaml": yaml.safe_dump(dict(TUNED), sort_keys=False),
    }


def package(folder: Path) -> Path:
    """Write the chart as it is installed into ``folder``, in place of an earlier one; its path."""
    chart = folder / CHART.name
    shutil.rmtree(chart, ignore_errors=True)
    shutil.copytree(CHART, chart)
    shutil.copy(ROOT / "deploy" / "prometheus" / "alerts.yaml", chart / "files")
    boards = chart / "files" / "dashboards"
    boards.mkdir()
    for board in (ROOT / "deploy" / "grafana").glob("*.json"):
        shutil.copy(board, boards)
    return chart


def values_schema() -> dict[str, Any]:
    """The schema of the chart's values: the file's own part, and the configuration's schema."""
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    config = _rules(SluiceConfig.model_json_schema())
    definitions = config.pop("$defs")
    config["description"] = schema["properties"]["config"]["description"]
    schema["properties"]["config"] = config
    schema["$defs"] = definitions
    return schema


def _rules(node: Any) -> Any:
    """A schema without titles, descriptions and defaults, which docs/configuration.md has: the
    chart's schema only refuses invalid values."""
    if isinstance(node, list):
        return [_rules(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _rules(below) for name, below in value.items()}
        if key in ("properties", "$defs")
        else _rules(value)
        for key, value in node.items()
        if key not in ("title", "description", "default")
    }


def values_table(schema: dict[str, Any]) -> str:
    """Markdown of every value: name, meaning, default."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    lines = ["", "| value | what | default |", "| --- | --- | --- |"]
    for name, node, default in _values(schema, defaults, ""):
        shown = "" if default is None else f"`{json.dumps(default)}`".replace("|", "\\|")
        lines.append(f"| `{name}` | {_meaning(node)} | {shown} |")
    return "\n".join(lines) + "\n\n"


def _meaning(node: dict[str, Any]) -> str:
    allowed = ", ".join(f"`{value}`" for value in node.get("enum", ()))
    meaning: str = node["description"]
    return f"{meaning} One of {allowed}." if allowed else meaning


def _values(
    node: dict[str, Any], default: Any, path: str
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The values below ``path`` with their schemas and defaults; ``[]`` is each entry of a list."""
    if path == "config":  # Its fields have a page of their own.
        yield path, node, default
        return
    items = node.get("items", {})
    if "properties" in items:
        yield path, node, None
        yield from _values(items, {}, f"{path}[]")
        return
    if "properties" not in node:
        yield path, node, default
        return
    if path and not path.endswith("[]"):
        yield path, node, None
    for name, below in node["properties"].items():
        if "description" in below:
            value = default.get(name) if isinstance(default, dict) else None
            yield from _values(below, value, f"{path}.{name}" if path else name)


@click.command()
@click.option(
    "--package",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the chart as it is installed into this folder.",
)
def main(folder: Path | None) -> None:
    """Write the parts of the chart that follow from the code, or its package."""
    if folder is not None:
        click.echo(package(folder))
        return
    for path, content in contents().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
