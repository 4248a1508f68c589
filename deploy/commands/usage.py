"""``sluice usage``: who has used the engines, and what a promise kept costs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from sluice.deploy.commands.admin import AdminApi, UsageAnswer, admin_options
from sluice.deploy.commands.options import CONFIG_FILE, Exit, Failure
from sluice.deploy.json_http import printable
from sluice.deploy.tables import print_table

_KEY = ("model", "client", "class")
_SUMS = ("engine_seconds", "gpu_seconds", "kv_block_seconds", "promised", "kept")


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
    price = found["gpu_hour_price"]
    for row in found["rows"]:
        cost = None if price is None else price * row["gpu_seconds"] / 3600
        row["cost"] = cost
        row["cost_per_kept"] = cost / row["kept"] if cost is not None and row["kept"] else None
    if form == "json":
        click.echo(json.dumps(found, indent=2))
    elif form == "csv":
        _print_csv([{**_of_all(found), **row} for row in found["rows"]])
    elif form == "focus":
        if price is None:
            raise Failure(Exit.FAILED, "costs need router.gpu_hour_price in the configuration")
        _print_csv([_focus(found, row) for row in found["rows"]])
    else:
        _print(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
        UsageAnswer.model_validate_json(text)
    except (OSError, ValidationError) as error:
        raise Failure(
            Exit.USAGE, f"{path} is no file of `sluice usage --format json`: {error}"
        ) from None
    found: dict[str, Any] = json.loads(text)
    return found


def _difference(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was used between two answers. Raises Failure: the totals are of a later start."""
    earlier = {tuple(row[name] for name in _KEY): row for row in before["rows"]}
    rows = []
    for row in now["rows"]:
        old = earlier.pop(tuple(row[name] for name in _KEY), dict.fromkeys(_SUMS, 0.0))
        rows.append(row | {name: row[name] - old[name] for name in _SUMS})
    busy_s = now["busy_seconds"] - before["busy_seconds"]
    if earlier or min((busy_s, *(row[name] for row in rows for name in _SUMS))) < -1e-6:
        raise Failure(
            Exit.FAILED,
            "the totals are lower than in that file: the application, or the observer of its "
            "metrics, has restarted since",
        )
    return now | {"since": before["until"], "busy_seconds": busy_s, "rows": rows}


def _of_all(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("since", "until", "currency")}


def _focus(found: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row of the FinOps Open Cost and Usage Specification, 1.2; ``x_``: columns of our own."""
    hours = row["gpu_seconds"] / 3600
    return {
        "BilledCost": row["cost"],
        "BillingCurrency": found["currency"],
        "ChargeCategory": "Usage",
        "ChargeDescription": f"GPU time of {row['model']}, class {row['class']}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": found["until"],
        "ChargePeriodStart": found["since"],
        "ConsumedQuantity": hours,
        "ConsumedUnit": "GPU-Hours",
        "EffectiveCost": row["cost"],
        "ListUnitPrice": found["gpu_hour_price"],
        "PricingQuantity": hours,
        "PricingUnit": "GPU-Hours",
        "ResourceName": row["model"],
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Sluice",
        "SubAccountId": row["client"],
        "SubAccountName": row["client"],
        "Tags": json.dumps({"class": row["class"]}),
        "x_EngineSeconds": row["engine_seconds"],
        "x_KvBlockSeconds": row["kv_block_seconds"],
        "x_PromisesKept": row["kept"],
        "x_PromisesMade": row["promised"],
    }


def _print_csv(rows: list[dict[str, Any]]) -> None:
    if rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _print(found: dict[str, Any]) -> None:
    currency = found["currency"]
    table = Table(
        *("model", "client", "class", "engine s", "GPU s", "KV block s", "kept", "promised"),
        *(() if found["gpu_hour_price"] is None else (currency, f"{currency} per kept")),
    )
    for row in found["rows"]:
        numbers = [f"{row[name]:.3f}" for name in _SUMS[:3]]
        numbers += [f"{row[name]:.0f}" for name in ("kept", "promised")]
        if row["cost"] is not None:
            each = row["cost_per_kept"]
            numbers += [f"{row['cost']:.6f}", "" if each is None else f"{each:.8f}"]
        table.add_row(*(Text(printable(row[name])) for name in _KEY), *numbers)
    print_table(table)
    click.echo(
        f"engines were busy for {found['busy_seconds']:.3f} s from {found['since']} to "
        f"{found['until']}"
    )
