"""The generated parts of ``docs/``: ``python -m sluice.deploy.reference`` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from sluice.deploy.config import SluiceConfig
from sluice.scheduling import admission, autoscaling, batching, routing
from sluice.scheduling.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "configuration.md"
POLICIES = ROOT / "docs" / "policies"

Schema = dict[str, Any]

_HEAD = """\
# Configuration

Every field of the configuration file, with its type, its default and its bounds. This page is
written from the code by `python -m sluice.deploy.reference`; `sluice config schema` prints the same
for editors and scripts.

A file holds only what differs from the defaults. Unknown fields are refused, and so is every value
that is out of bounds. `sluice config check FILE` says what is wrong with a file, and
`sluice config show FILE` prints it with every default filled in. Flags of a command win over the
file.

For example:

<!-- check: config -->
```yaml
engine:
  model: Qwen/Qwen3-8B
  vllm_args: {max-model-len: 8192}
replica:
  count: 4
router:
  host: 0.0.0.0
  default_class: standard
```

Names in `<>` are yours to choose. `[]` stands for each entry of a list. `a.b` is the field `b` of
the object `a`.
"""

_FEW = 4
"""An object with at most as many fields has its rows in the table of what holds it."""

_RANGES = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " entries"),
    ("minProperties", "maxProperties", " entries"),
)


class _Section(NamedTuple):
    path: str
    schema: Schema
    values: Any
    """What the defaults put there, where they do."""


class _Kind(NamedTuple):
    folder: str
    registered: Mapping[str, type[Policy]]
    setting: str
    """The field that names the policy; that of its options ends in ``_options``."""


KINDS = {
    "batch": _Kind("batching", batching.POLICIES.own, "engine.policy"),
    "routing": _Kind("routing", routing.POLICIES.own, "controller.policy"),
    "admission": _Kind("admission", admission.POLICIES.own, "controller.admission"),
    "autoscaling": _Kind("autoscaling", autoscaling.POLICIES.own, "replica.autoscaling.policy"),
}
"""The kinds of policies with a page each, as ``sluice policies`` names the kinds."""


def configuration() -> str:
    """The page on the configuration."""
    schema = SluiceConfig.model_json_schema(by_alias=True)
    reader = _Reader(schema.get("$defs", {}))
    values = SluiceConfig().model_dump(mode="json")
    parts = [_HEAD]
    # All of them first: rows link to the sections of their objects.
    for section in list(reader.sections(_Section("", schema, values))):
        title = f"## `{section.path}`" if section.path else "## The file"
        description = _plain(section.schema.get("description", ""))
        rows = "\n".join(reader.rows(section))
        parts.append(
            f"{title}\n\n{description}\n\n"
            f"| field | type | default | allowed | meaning |\n|---|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def policy_facts(kind: str, name: str) -> str:
    """How a policy is set, its options, where it was published and where its code is."""
    about = KINDS[kind]
    policy = about.registered[name]
    schema = policy.Options.model_json_schema(by_alias=True)
    reader = _Reader(schema.get("$defs", {}))
    file = f"{policy.__module__.removeprefix('sluice.').replace('.', '/')}.py"
    options = ["- It has no options."]
    table = []
    if schema.get("properties"):
        options = [f"- Options, under `{about.setting}_options`: see the table."]
        table = [
            "",
            "| option | type | default | allowed | meaning |",
            "|---|---|---|---|---|",
            *reader.rows(_Section("", schema, {})),
        ]
    return "\n".join(
        [
            f"- Set with `{about.setting}: {name}`.",
            *options,
            f"- Source: {policy.source}.",
            f"- Code: [{file}](../../../{file})",
            *table,
        ]
    )


def with_facts(kind: str, name: str, page: str) -> str:
    """``page`` with the generated part renewed. Raises ValueError: the page has no place for it."""
    part = re.compile(r"(<!-- generated -->\n).*?(<!-- end -->)", re.DOTALL)
    if not part.search(page):
        raise ValueError(f"the page of {name} has no lines <!-- generated --> and <!-- end -->")
    facts = policy_facts(kind, name)
    return part.sub(lambda found: f"{found[1]}{facts}\n{found[2]}", page)


def pages() -> Iterator[tuple[Path, str]]:
    """Every file that has generated parts, and what it should hold."""
    yield CONFIGURATION, configuration()
    for kind, about in KINDS.items():
        for name in about.registered:
            path = POLICIES / about.folder / f"{name}.md"
            yield path, with_facts(kind, name, path.read_text(encoding="utf-8"))


class _Reader:
    """Reads JSON schemas as pydantic writes them."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._definitions = definitions
        self._places: dict[str, str] = {}
        self._within: set[str] = set()

    def sections(self, top: _Section) -> Iterator[_Section]:
        """``top`` and everything nested in it, each definition once."""
        yield top
        for name, field in top.schema.get("properties", {}).items():
            path = f"{top.path}.{name}" if top.path else name
            values = top.values.get(name) if isinstance(top.values, dict) else None
            for title, place, nested in self._nested(path, field):
                if title in self._places:
                    continue
                self._places[title] = place
                if place == path and len(nested["properties"]) <= _FEW and top.path:
                    self._within.add(title)
                    continue
                known = values if place == path else None
                yield from self.sections(_Section(place, nested, known))

    def _nested(self, path: str, field: Schema) -> Iterator[tuple[str, str, Schema]]:
        """The objects that ``field`` may hold: name of the definition, place, schema."""
        if "$ref" in field:
            title = field["$ref"].rpartition("/")[2]
            schema = self._definitions[title]
            if "properties" in schema:
                yield title, path, schema
        for choice in (*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ())):
            yield from self._nested(path, choice)
        if isinstance(field.get("items"), dict):
            yield from self._nested(f"{path}[]", field["items"])
        for values in _values(field):
            yield from self._nested(f"{path}.<name>", values)

    def rows(self, section: _Section, prefix: str = "") -> Iterator[str]:
        """The table's rows, a field each."""
        required = section.schema.get("required", ())
        for name, field in section.schema.get("properties", {}).items():
            kinds, bounds = self._kinds(field)
            default = "required" if name in required else self._default(section, name, field)
            cells = (
                f"`{prefix}{name}`",
                " or ".join(dict.fromkeys(kinds)),
                default,
                ", ".join(dict.fromkeys(bounds)),
                _plain(field.get("description") or self._resolved(field).get("description", "")),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            values = section.values.get(name) if isinstance(section.values, dict) else None
            for title, place, nested in self._nested(name, field):
                if title in self._within and place == name:
                    yield from self.rows(_Section("", nested, values), f"{prefix}{name}.")

    def _resolved(self, field: Schema) -> Schema:
        """The definition that ``field`` is, where it is one."""
        return self._definitions.get(field.get("$ref", "").rpartition("/")[2], {})

    def _default(self, section: _Section, name: str, field: Schema) -> str:
        values = section.values if isinstance(section.values, dict) else {}
        value = values.get(name, field.get("default"))
        if isinstance(value, dict) and value:
            # Its own section says it.
            return "see below" if any(self._nested("", field)) else f"`{json.dumps(value)}`"
        return "" if value is None else f"`{json.dumps(value)}`"

    def _kinds(self, field: Schema) -> tuple[list[str], list[str]]:
        """What a field may hold, and its bounds, in words."""
        bounds = list(_bounds(field))
        if "$ref" in field:
            title = field["$ref"].rpartition("/")[2]
            if title in self._within:
                return ["object"], bounds
            if title in self._places:
                place = self._places[title]
                return [f"[object](#{_anchor(place)})"], bounds
            kinds, more = self._kinds(self._definitions[title])
            return kinds, bounds + more
        if "const" in field:
            return [f"`{json.dumps(field['const'])}`"], bounds
        if "enum" in field:
            return [", ".join(f"`{each}`" for each in field["enum"])], bounds
        choices = (*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ()))
        if choices:
            parts = [self._kinds(choice) for choice in choices]
            kinds = [kind for part in parts for kind in part[0]]
            return kinds, bounds + [bound for part in parts for bound in part[1]]
        return [self._kind(field)], bounds

    def _kind(self, field: Schema) -> str:
        kind = field.get("type", "anything")
        if kind == "array":
            items = field.get("items") or {"anyOf": field.get("prefixItems", [{}])}
            kinds, _ = self._kinds(items)
            return f"list of {' or '.join(dict.fromkeys(kinds))}"
        if kind == "object":
            inner = [kind for values in _values(field) for kind in self._kinds(values)[0]]
            inner = inner or ["anything"]
            return f"mapping of names to {' or '.join(inner)}"
        words = {"boolean": "true or false", "string": "text", "null": "null"}
        return words.get(kind, str(kind))


def _values(field: Schema) -> list[Schema]:
    """What a mapping of names holds, where that is said."""
    values = field.get("additionalProperties")
    named = list(field.get("patternProperties", {}).values())
    return [values, *named] if isinstance(values, dict) else named


def _bounds(field: Schema) -> Iterator[str]:
    """The bounds of a field, in words."""
    if "exclusiveMinimum" in field:
        yield f"> {_number(field['exclusiveMinimum'])}"
    for least, most, unit in _RANGES:
        low, high = field.get(least), field.get(most)
        if low is not None and high is not None:
            ends = _number(low) if low == high else f"{_number(low)} to {_number(high)}"
            yield ends + unit
        elif low is not None:
            yield "not empty" if unit and low == 1 else f"≥ {_number(low)}{unit}"
        elif high is not None:
            yield f"≤ {_number(high)}{unit}"
    if "exclusiveMaximum" in field:
        yield f"< {_number(field['exclusiveMaximum'])}"
    if "pattern" in field:
        yield f"matches `{field['pattern']}`"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _plain(text: str) -> str:
    """One line, without the markup of docstrings."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def _anchor(path: str) -> str:
    """The name by which a page links to the section ``path``."""
    return re.sub(r"[^\w\- ]", "", path.lower())


@click.command()
def main() -> None:
    """Write the generated parts of the documents."""
    for path, text in pages():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
