"""What an engine's batch log holds of each plan, so that it can be planned again."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.scheduling.batching import (
    BatchBudget,
    BatchPlan,
    BatchPolicy,
    BestEffortOptions,
    make_policy,
)
from sluice.scheduling.latency.model import FAMILIES, LatencyModel
from sluice.scheduling.request.kernels import FIELDS
from sluice.scheduling.request.queue import QueueView
from sluice.telemetry.records import whole_lines

_FACTORS = "correction", "fixed_correction", "headroom", "spread"


class PlanRecords:
    """The inputs of the latest plan, until they are taken into the record of its batch. A policy
    is recorded where it is another one than before."""

    def __init__(self) -> None:
        self._policy: BatchPolicy | None = None
        self._inputs: tuple[QueueView, dict[str, object]] | None = None

    def note(
        self,
        policy: BatchPolicy,
        queue: QueueView,
        now_s: float,
        model: LatencyModel,
        budget: BatchBudget,
    ) -> None:
        """``queue`` will be planned."""
        factors = [getattr(model, name) for name in _FACTORS]
        found: dict[str, object] = {
            "plan_s": now_s,
            "keys": queue.keys.tolist(),
            "rows": b64encode(queue.table.tobytes()).decode(),
            "budget": budget,
            "model": [model.family, model.coefficients, factors],
        }
        if policy is not self._policy:
            self._policy = policy
            options = (
                each.options.model_dump(mode="json") for each in (policy, policy.best_effort)
            )
            found["policy"] = [policy.name, *options]
        self._inputs = queue, found

    def take(self, plan: BatchPlan, name: Callable[[str], str]) -> Mapping[str, object]:
        """The inputs of ``plan``, with the names of its requests."""
        if self._inputs is None:
            return {}
        (queue, found), self._inputs = self._inputs, None
        ids = queue.request_ids(np.arange(len(queue)))
        evicted = [name(each) for each in plan.evicted_ids]
        return {**found, "queue": [name(each) for each in ids], "evicted": evicted}


class Planned(NamedTuple):
    """A plan of a log: its inputs, the plan then and the record of its batch. ``policy`` is new and
    the one that planned from here on; ``None``: the one before."""

    queue: QueueView
    now_s: float
    model: LatencyModel
    budget: BatchBudget
    tokens_of: Mapping[str, int]
    record: Mapping[str, Any]
    policy: BatchPolicy | None = None


def read_plans(path: Path) -> Iterator[Planned]:
    """The plans of a batch log, ``.gz`` or not, in their order. Raises ValueError: it is none;
    OSError."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(whole_lines(lines), 1):
            try:
                record = json.loads(line)
                if "rows" in record:
                    yield _planned(record)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}:{number} is no record of a batch: {error!r}") from None


def _planned(record: Mapping[str, Any]) -> Planned:
    table = np.frombuffer(b64decode(record["rows"])).reshape(-1, FIELDS)
    keys = np.array(record["keys"], np.int64)
    queue = QueueView.of_table(keys, table, (), record["queue"])
    family, coefficients, factors = record["model"]
    made = FAMILIES[family](*coefficients, **dict(zip(_FACTORS, factors, strict=True)))
    policy = None
    if "policy" in record:
        name, options, best_effort = record["policy"]
        policy = make_policy(name, options, BestEffortOptions.model_validate(best_effort))
    budget, tokens_of = BatchBudget(*record["budget"]), dict(record["plan"])
    return Planned(queue, record["plan_s"], made, budget, tokens_of, record, policy)
