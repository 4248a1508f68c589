"""``sluice usage`` against a router's admin API, fed with what processes push."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from sluice.controller.observability.metrics import samples_of
from sluice.deploy.commands.options import Exit
from tests.controller.fleet import newer_push
from tests.deploy.test_fleet_commands import Application
from tests.e2e.conftest import wait_until


class Priced(Application):
    """At 3.60 an hour a GPU second costs a thousandth."""

    def __init__(self, price: float | None = 3.6) -> None:
        super().__init__(price)
        self.registry = registry = CollectorRegistry()
        by = ["client", "class"]
        self.used = [
            Counter(f"sluice_engine_{name}", "", by, registry=registry)
            for name in ("seconds", "gpu_seconds", "kv_block_seconds")
        ]
        self.promises = Counter("sluice_client_promises", "", [*by, "outcome"], registry=registry)

    def use(self, client: str, service_class: str, seconds: float, kept: int, missed: int) -> None:
        """A replica and a router push once more."""
        for counter, factor in zip(self.used, (1, 2, 100), strict=True):
            counter.labels(client, service_class).inc(factor * seconds)
        for outcome, count in (("kept", kept), ("missed", missed)):
            if count:
                self.promises.labels(client, service_class, outcome).inc(count)
        push = newer_push("process", samples_of(self.registry))
        self.tell(self.controller.observer.push_metrics(push))


@pytest.fixture
def priced() -> Iterator[Priced]:
    with Priced().serving() as it:
        it.use("a", "chat", 10.0, 4, 1)
        it.use("unattributed", "none", 2.0, 0, 0)
        yield it


def test_a_promise_kept_has_a_price(priced: Priced) -> None:
    found = json.loads(priced.run("usage", "--format", "json").stdout)
    assert (found["gpu_hour_price"], found["currency"]) == (3.6, "USD")
    assert found["rows"] == [
        {
            **{"model": "m", "client": "a", "class": "chat"},
            **{"engine_seconds": 10.0, "gpu_seconds": 20.0, "kv_block_seconds": 1000.0},
            **{"promised": 5.0, "kept": 4.0},
            **{"cost": pytest.approx(0.02), "cost_per_kept": pytest.approx(0.005)},
        },
        {
            **{"model": "m", "client": "unattributed", "class": "none"},
            **{"engine_seconds": 2.0, "gpu_seconds": 4.0, "kv_block_seconds": 200.0},
            **{"promised": 0.0, "kept": 0.0},
            **{"cost": pytest.approx(0.004), "cost_per_kept": None},
        },
    ]
    shown = priced.run("usage")
    assert "engines were busy for 12.000 s" in shown.stderr
    assert "m\ta\tchat\t10.000\t20.000\t1000.000\t5\t4\t0.020000\t0.00500000" in shown.stdout


def test_csv_and_focus_have_a_row_for_each(priced: Priced) -> None:
    plain, focus = (
        list(csv.DictReader(io.StringIO(priced.run("usage", "--format", form).stdout)))
        for form in ("csv", "focus")
    )
    assert [row["client"] for row in plain] == ["a", "unattributed"]
    assert float(plain[0]["cost_per_kept"]) == pytest.approx(0.005)
    assert [float(row["BilledCost"]) for row in focus] == pytest.approx([0.02, 0.004])
    first = focus[0]
    assert (first["SubAccountId"], json.loads(first["Tags"])) == ("a", {"class": "chat"})
    assert (float(first["ConsumedQuantity"]), first["ConsumedUnit"]) == (20 / 3600, "GPU-Hours")
    assert first["ChargePeriodStart"] <= first["ChargePeriodEnd"]


def test_what_came_after_a_file_is_the_difference(priced: Priced, tmp_path: Path) -> None:
    priced.clock.advance(3600.0)
    earlier = tmp_path / "earlier.json"
    earlier.write_text(priced.run("usage", "--format", "json").stdout)
    priced.use("a", "chat", 1.0, 1, 0)
    priced.use("b", "chat", 3.0, 0, 0)
    now = ("usage", "--format", "json", "--since", str(earlier))
    wait_until(lambda: '"b"' in priced.run(*now).stdout, "it asks again")
    found = json.loads(priced.run(*now).stdout)
    used = {row["client"]: (row["engine_seconds"], row["kept"]) for row in found["rows"]}
    assert used == {"a": (1.0, 1.0), "b": (3.0, 0.0), "unattributed": (0.0, 0.0)}
    assert found["since"] == json.loads(earlier.read_text())["until"]

    lower = json.loads(earlier.read_text())
    lower["rows"][0]["engine_seconds"] = 99.0
    earlier.write_text(json.dumps(lower))
    result = priced.run(*now)
    assert (result.exit_code, "has restarted since" in result.stderr) == (Exit.FAILED, True)
    # Each total may be larger again than before the restart.
    nothing = {"rows": [], "until": "2020-01-01T00:00:00Z"}
    for known, code in ((lower | nothing, Exit.FAILED), (found, Exit.USAGE), ({}, Exit.USAGE)):
        earlier.write_text(json.dumps(known))
        assert priced.run(*now).exit_code == code


def test_without_a_price_nothing_costs_anything() -> None:
    with Priced(None).serving() as it:
        it.use("a", "chat", 1.0, 1, 0)
        found = json.loads(it.run("usage", "--format", "json").stdout)
        assert [row["cost"] for row in found["rows"]] == [None]
        assert it.run("usage").stdout == "m\ta\tchat\t1.000\t2.000\t100.000\t1\t1\n"
        refused = it.run("usage", "--format", "focus")
        assert (refused.exit_code, "gpu_hour_price" in refused.stderr) == (Exit.FAILED, True)
        assert it.run("usage", key="another-key").exit_code == Exit.REFUSED
