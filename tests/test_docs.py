"""The documents name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.config import SluiceConfig

ROOT = Path(__file__).parent.parent


def documented_metrics() -> set[str]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(sluice_[a-z_]+)` \|", text, flags=re.MULTILINE))


def test_every_metric_is_documented_and_none_is_invented() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("router", "controller", "replica")
        for path in (ROOT / package).glob("*.py")
        if path.name != "vllm_args.py"  # arguments of the engine, which share the prefix
    ]
    in_code = {name for text in sources for name in re.findall(r'"(sluice_[a-z_]+)"', text)}
    # The client library adds the suffix of counters, and takes it off a name that has it.
    documented = {name.removesuffix("_total") for name in documented_metrics()}
    assert documented == {name.removesuffix("_total") for name in in_code}


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_documented_default_classes_are_the_defaults() -> None:
    text = (ROOT / "docs" / "slo.md").read_text(encoding="utf-8")
    for name, entry in SluiceConfig().router.classes.items():
        (row,) = re.findall(rf"^\| `{name}`.*$", text, flags=re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]

        def shown(value_ms: float | None) -> str:
            return "none" if value_ms is None else f"{value_ms:,.0f} ms"

        tiers = ", ".join(f"`{tier}`" for tier in entry.service_tiers)
        expected = [shown(entry.ttft_ms), shown(entry.tpot_ms), str(entry.priority), tiers]
        assert cells[1:] == expected
