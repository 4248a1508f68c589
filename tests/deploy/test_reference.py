from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from sluice.deploy.config import SluiceConfig
from sluice.deploy.reference import CONFIGURATION, configuration, policy_facts, with_facts
from tests.documents import rows, section


def nested(model: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from nested(value, f"{path}.{name}" if path else name)


def test_every_field_of_every_section_has_its_row() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    for path, model in nested(SluiceConfig()):
        within = f"## `{path}`\n" not in text and bool(path)
        parent, _, name = path.rpartition(".") if within else (path, "", "")
        table = rows(section(CONFIGURATION, f"`{parent}`" if parent else "The file"))
        fields = {f"{name}.{field}" if within else field for field in type(model).model_fields}
        assert fields <= set(table), path
        # The last column is the meaning.
        assert all(cells[-1] for cells in table.values()), path


def test_defaults_bounds_and_links_are_those_of_the_code() -> None:
    text = configuration()
    assert '| `default_class` | text | `"standard"` |' in text
    assert "| `port` | integer | `8000` | 1 to 65,535 |" in text
    assert "| `drain_timeout_s` | number | `600.0` | > 0 |" in text
    assert "| `router` | [object](#router) | see below |" in text
    assert "| `classes` | mapping of names to [object](#routerclassesname) | see below |" in text
    # What it would print of a secret is nothing: there is none by default.
    assert "**********" not in text


def test_the_facts_of_a_policy() -> None:
    facts = policy_facts("routing", "go_routing")
    assert facts.startswith("- Set with `controller.policy: go_routing`.")
    assert "| `lambda` | number | `0.5` | 0 to 1 |" in facts, "as the configuration names it"
    assert "(../../../scheduling/routing/go_routing.py)" in facts
    assert "It has no options." in policy_facts("batch", "fcfs")


def test_only_the_generated_part_of_a_page_is_renewed() -> None:
    page = "# title\n\n<!-- generated -->\nold \\1\n<!-- end -->\n\nend\n"
    renewed = with_facts("batch", "fcfs", page)
    assert renewed.startswith("# title\n\n<!-- generated -->\n- Set with")
    assert renewed.endswith("<!-- end -->\n\nend\n") and "old" not in renewed
    assert with_facts("batch", "fcfs", renewed) == renewed
    with pytest.raises(ValueError, match="fcfs"):
        with_facts("batch", "fcfs", "no place")
