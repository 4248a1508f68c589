"""``sluice usage``: who has used the engines, and what a promise kept costs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click

from sluice.deploy.commands.admin import AdminApi, UsageAnswer, admin_options
from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure
from sluice.deploy.json_http import printable
from sluice.deploy.tables import print_list

_KEY = ("model", "client", "class")
_SUMS = ("engine_seconds", "gpu_seconds", "kv_block_seconds", "promised", "kept")
_COSTS = ("cost", "cost_per_kept")


@click.command()
@admin_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "focus"]),
    default="table",
    show_default=True,
    help="focus: CSV with the columns of FOCUS 1.2 that fit; it needs a price.",
)
@click.option(
    "--since",
    "before",
    type=CONFIG_FILE,
    help="A file of an earlier `sluice usage --format json`: only what came after it.",
)
def usage(address: str, key: str | None, form: str, before: Path | None) -> None:
    """Say who has used the engines, and what a promise kept costs.

    Of each tenant (an API key's name) and class: seconds of engines, GPU seconds, KV blocks times
    seconds, promises made and kept, and with router.gpu_hour_price the cost of it, and of each
    promise kept. `unattributed` has what is no client's, such as profiling and warm-up.

    \b
    Examples:
      sluice usage
      sluice usage --format json > monday.json
      sluice usage --since monday.json --format focus > since-monday.csv
    """
    found = AdminApi(address, key).usage()
    if before is not None:
        found = _difference(found, _read(before))
    price, rows = found["gpu_hour_price"], found["rows"]
    for row in rows:
        cost = None if price is None else price * row["gpu_seconds"] / 3600
        row["cost"] = cost
        row["cost_per_kept"] = cost / row["kept"] if cost is not None and row["kept"] else None
    if form == "focus":
        if price is None:
            raise Failure(Exit.FAILED, "costs need router.gpu_hour_price in the configuration")
        rows = [_focus(found, row) for row in rows]
    if form == "json":
        click.echo(json.dumps(found, indent=2))
    elif form == "table":
        _print(found)
    elif rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        UsageAnswer.model_validate(found)
        if "difference" in found:
            raise ValueError("it was made with --since, and has no totals")
    except (OSError, ValueError) as error:
        raise Failure(
            Exit.USAGE, f"{path} is no file of `sluice usage --format json`: {error}"
        ) from None
    return found


def _difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was used between two answers. Raises Failure: the totals are of a later start."""
    earlier = {tuple(row[name] for name in _KEY): row for row in before["rows"]}
    rows = []
    for row in now["rows"]:
        old = earlier.pop(tuple(row[name] for name in _KEY), dict.fromkeys(_SUMS, 0.0))
        rows.append(row | {name: row[name] - old[name] for name in _SUMS})
    restarted = now["since"] > before["until"]
    if restarted or earlier or any(row[name] < -1e-6 for row in rows for name in _SUMS):
        raise Failure(
            Exit.FAILED,
            "the totals do not include those of that file: the application, or the observer of "
            "its metrics, has restarted since",
        )
    return now | {"since": before["until"], "difference": True, "rows": rows}


def _focus(found: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of the FinOps Open Cost and Usage Specification, 1.2; ``x_``: columns of our own."""
    hours = row["gpu_seconds"] / 3600
    return {
        **dict.fromkeys(("BilledCost", "EffectiveCost"), row["cost"]),
        "BillingCurrency": found["currency"],
        "ChargeCategory": "Usage",
        "ChargeDescription": f"GPU time of {row['model']}, class {row['class']}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": found["since"],
        "ChargePeriodEnd": found["until"],
        **dict.fromkeys(("ConsumedQuantity", "PricingQuantity"), hours),
        **dict.fromkeys(("ConsumedUnit", "PricingUnit"), "GPU-Hours"),
        "ListUnitPrice": found["gpu_hour_price"],
        "ResourceName": row["model"],
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Sluice",
        **dict.fromkeys(("SubAccountId", "SubAccountName"), row["client"]),
        "Tags": json.dumps({"class": row["class"]}),
        "x_EngineSeconds": row["engine_seconds"],
        "x_KvBlockSeconds": row["kv_block_seconds"],
        "x_PromisesKept": row["kept"],
        "x_PromisesMade": row["promised"],
    }


def _print(found: dict[str, Any]) -> None:
    columns = [*_KEY, "engine s", "GPU s", "KV block s", "promised", "kept"]
    digits = dict(zip((*_SUMS, *_COSTS), (3, 3, 3, 0, 0, 6, 8), strict=True))
    if found["gpu_hour_price"] is None:
        del digits["cost"], digits["cost_per_kept"]
    else:
        columns += [found["currency"], f"{found['currency']} per kept"]
    rows = [
        [printable(row[name]) for name in _KEY]
        + ["" if row[name] is None else f"{row[name]:.{most}f}" for name, most in digits.items()]
        for row in found["rows"]
    ]
    print_list(columns, rows)
    busy_s = sum(row["engine_seconds"] for row in found["rows"])
    since = f"from {found['since']} to {found['until']}"
    click.echo(f"engines were busy for {busy_s:.3f} s {since}", err=True)
