"""Tables fit a terminal of 80 columns, and no number or name is cut."""

from __future__ import annotations

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.experiments import EXPERIMENTS
from sluice.deploy.cli import main
from sluice.deploy.commands import admin
from sluice.deploy.commands.offline import all_policies
from sluice.deploy.tables import print_table

WIDTH = 80


def row(replica_id: str, model: str, **fields: Any) -> dict[str, Any]:
    """A replica as the admin API has it, with large figures."""
    return {
        **{"replica_id": replica_id, "model": model, "role": "prefill", "condition": "quarantined"},
        **{"drain": None, "report_age_ms": 120_000.0, "waiting": 2_048, "running": 256},
        "quarantine": {"reason": "failed", "state": "open", "since_ms": 9.0, "retry_in_ms": None},
        **{"reserved": 0, "prefill_ms": 98_765.4, "kv_usage": 0.987, "pab_tokens": 98_765.0},
        **{"last_step_ms": 432.1, "predicted_step_ms": 431.9, "preemptions": 12_345},
        **fields,
    }


def of_class(name: str, model: str) -> dict[str, Any]:
    return {
        **{"class": name, "model": model, "requests": 1_234_567, "attainment": 0.9876},
        **{"tdg": 0.9876, "ttft_ms": {"p50": 12_345.6, "p95": 123_456.7}},
        "admission": {"guaranteed": 1_234_567, "best_effort": 123_456, "refused": 12_345},
    }


MODELS = ("m", "meta-llama/Llama-3.3-70B-Instruct-with-a-long-name")
FLEET = {
    "models": {
        model: {"up": True, "policy": "most_gain", "admission": "pab", "decision_ms": {"p99": 1.25}}
        for model in MODELS
    },
    "unavailable": [],
    "replicas": [
        each
        for model in MODELS
        for each in (
            row("k3jx8w2p", model),
            row("w81qz0sd", model, role="decode", condition="fresh", quarantine=None),
        )
    ],
    "classes": [of_class("interactive", model) for model in MODELS],
}


class Answers:
    """In place of a server."""

    address = "http://127.0.0.1:8000"

    def __init__(self, *_: object) -> None:
        pass

    def ask(self, *_: object) -> object:
        return FLEET


def lines_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setattr(admin, "JsonServer", Answers)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.parametrize("command", ["status", "top"])
def test_the_tables_of_a_fleet_fit(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, command)
    shown = " ".join(lines).split()
    for text in (
        *("k3jx8w2p", "w81qz0sd", "prefill", "decode", "quarantined", "failed", "2048", "12345"),
        *("98,765", "99%", "432.1", "431.9", "1,234,567", "98.8%", "12,346", "123,457"),
        *("interactive", "123,456", "12,345", MODELS[1]),
    ):
        assert text in shown
    tables = lines if command == "top" else lines[lines.index("m") :]
    assert all(cell_len(line) <= WIDTH for line in tables)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("policies",), [each.name for each in all_policies()]),
        (("bench", "list"), list(EXPERIMENTS)),
    ],
    ids=["policies", "bench list"],
)
def test_lists_fit_and_name_everything(
    words: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(monkeypatch, *words)
    shown = " ".join(lines).split()
    assert set(names) <= set(shown)
    assert "…" not in " ".join(lines)
    assert all(cell_len(line) <= WIDTH for line in lines)


def test_options_of_policies_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = " ".join(lines_of(monkeypatch, "policies")).split()
    assert {name for each in all_policies() for name in each.options} <= set(shown)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_word_is_cut_whatever_the_width(width: int) -> None:
    table = Table("a name", "another, %")
    table.add_row("interactive-with-a-long-name", "[red]123,456.7 ± 0.3")
    out = io.StringIO()
    print_table(table, Console(file=out, width=width))
    assert {"interactive-with-a-long-name", "123,456.7", "0.3", "another,"} <= set(
        out.getvalue().split()
    )
