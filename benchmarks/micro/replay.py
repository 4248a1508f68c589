"""The plans of an engine's batch log, planned again: ``sluice bench replay``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from sluice.benchmarks.live.report import quantiles, table
from sluice.benchmarks.options import as_json, choices_option, show
from sluice.replica.scheduler.plan_log import Planned, read_plans
from sluice.scheduling.batching import POLICIES, BatchPolicy, make_policy
from sluice.scheduling.request.kernels import PENDING, PROMISED, is_prefill

AS_LOGGED = "as logged"


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@choices_option("--policy", "names", of=POLICIES, words="To compare, with their defaults.")
@as_json
def replay(log: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Plan each batch of an engine's LOG again, from the queue as it was then.

    The policy of the log must give the same plans; others show what they would have run instead.
    The queues stay those of the log, whatever a policy plans. `engine.batch_log` writes the logs.

    \b
    Example:
      sluice bench replay batches/replica-1.jsonl --policy fcfs
    """
    try:
        rows = replayed(read_plans(log), names)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not rows[0]["plans"]:
        raise click.ClickException(f"{log} has no plans")
    columns = list(rows[0])
    show(rows, [table(rows, *columns, title=f"Plans of {log.name}")], as_json)


def replayed(plans: Iterable[Planned], names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """A row for the policy of the log, and for each of ``names``. ``same``: share of the plans
    with the same tokens of the same requests; ``first_other``: number of the first other one;
    ``first_tokens``: promised prompts that a plan completes; ``real_over_predicted``: median and
    95th percentile of the time of the logged batches over that of the plan, where both are the
    same."""
    policies: dict[str, BatchPolicy] = {name: make_policy(name) for name in names}
    counts = {name: _Count() for name in (AS_LOGGED, *policies)}
    for each in plans:
        if each.policy is not None:
            policies[AS_LOGGED] = each.policy
        for name, policy in policies.items():
            counts[name].add(policy, each)
    return [{"policy": name, **count.row()} for name, count in counts.items()]


class _Count:
    """What a policy planned."""

    def __init__(self) -> None:
        self._plans = self._same = self._prefill = self._decodes = self._first = 0
        self._other: int | None = None
        self._ratios: list[float] = []

    def add(self, policy: BatchPolicy, each: Planned) -> None:
        queue = each.queue
        plan = policy.plan(queue, each.now_s, each.model, each.budget)
        self._plans += 1
        rows, prefills = queue.table[plan.rows], is_prefill(queue.table)[plan.rows]
        if plan.tokens_of == each.tokens_of and plan.evicted_ids == each.record["evicted"]:
            self._same += 1
            if plan.predicted_s > 0 and each.record["seconds"] > 0:
                self._ratios.append(each.record["seconds"] / plan.predicted_s)
        elif self._other is None:
            self._other = self._plans
        self._prefill += int(plan.tokens[prefills].sum())
        self._decodes += int(np.count_nonzero(~prefills))
        whole = prefills & (plan.tokens >= rows[:, PENDING]) & (rows[:, PROMISED] > 0)
        self._first += int(np.count_nonzero(whole))

    def row(self) -> dict[str, Any]:
        return {
            "plans": self._plans,
            "same": round(self._same / self._plans, 4) if self._plans else None,
            "first_other": self._other,
            "prefill_tokens": self._prefill,
            "decodes": self._decodes,
            "first_tokens": self._first,
            "real_over_predicted": quantiles(self._ratios, (0.5, 0.95), 3),
        }
