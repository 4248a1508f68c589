"""Speculative decoding in an engine: its configuration, the number of tokens to draft for the next
step, the time of drafting, and the counts of accepted drafts.

The plan decides how many of the drafted tokens a step checks, see
:mod:`sluice.scheduling.latency.speculation`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from sluice.scheduling.fleet.state import DRAFT_LENGTHS
from sluice.scheduling.latency.speculation import AcceptanceRates

MOST_DRAFTED = 32
"""Max tokens that an engine may draft for one step of a request."""

BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
"""vLLM's setting of draft lengths by batch size. Sluice sets it, and replaces its table."""

FREE_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Methods that look drafts up, in negligible time; the others run a draft model."""

_PROBE_STEPS = 8
_MEMORY = 0.98
_MOST_RATIO = 4.0


def with_all_lengths(given: Any) -> dict[str, Any]:
    """vLLM's ``speculative-config`` with every length from 0 to the max, so that vLLM is prepared
    for each. vLLM takes one length per batch size; these values do not matter.

    Args:
        given: a mapping, or JSON of one.

    Raises:
        ValueError: ``given`` is neither, has no valid ``num_speculative_tokens``, or sets lengths
            itself.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"speculative-config is no JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"speculative-config must be a mapping, got {given!r}")
    config = {str(name).replace("-", "_"): value for name, value in given.items()}
    if BY_BATCH_SIZE in config:
        raise ValueError(
            f"speculative-config may not hold {BY_BATCH_SIZE}: the plan chooses the lengths"
        )
    most = config.get("num_speculative_tokens")
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_DRAFTED:
        raise ValueError(
            "speculative-config needs num_speculative_tokens, the most tokens to draft: "
            f"1 to {MOST_DRAFTED}, got {most!r}"
        )
    return {**config, BY_BATCH_SIZE: [[each + 1, each + 1, each] for each in range(most + 1)]}


class DraftLength:
    """How many tokens the engine drafts in the next step, for the step after it.

    It replaces vLLM's table of lengths by batch size, and returns the same length for every batch
    size. Looking drafts up costs nothing, so the length is always the max. A draft model drafts one
    token more than the last plan took, so that the next plan can take more, and none after a plan
    that took none. Then, in every eighth step with decodes, it drafts the max, to check whether
    drafts pay again.

    Args:
        method: vLLM's name of the draft method.
        most: max tokens to draft.
    """

    def __init__(self, method: str, most: int) -> None:
        self.free = method in FREE_METHODS
        self.length = most
        self._most = most
        self._idle = 0

    def __getitem__(self, batch_size: int) -> int:
        return self.length

    def planned(self, decodes: bool, offered: bool, taken: int) -> None:
        """A batch has been planned.

        Args:
            decodes: it has decodes.
            offered: tokens were drafted for at least one of them.
            taken: max drafted tokens of one decode that it checks.
        """
        if self.free:
            return
        if offered:
            self._idle = 0
            self.length = min(taken + 1, self._most) if taken else 0
        elif decodes and not self.length:
            self._idle += 1
            if self._idle >= _PROBE_STEPS:
                self.length = self._most


class DraftTime:
    """Time to draft one token for every decode, learned from whole steps: the two unknowns of
    ``step = factor * predicted + drafted * time`` by least squares, with decreasing weight of older
    steps. ``O(1)``.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)
        self.seconds = 0.0
        """Seconds per drafted token, >= 0."""

    def observe(self, predicted_s: float, drafted: int, seconds: float) -> None:
        """One step.

        Args:
            predicted_s: its time without drafting, > 0.
            drafted: max tokens drafted for one decode in it.
            seconds: its real time.
        """
        # A step that the machine delayed must not weigh as much as hundreds.
        ratio = min(seconds / predicted_s, _MOST_RATIO)
        # In units of the step: a long step is no better evidence than a short one.
        known = np.array([1.0, drafted / predicted_s])
        self._squares = _MEMORY * self._squares + np.outer(known, known)
        self._products = _MEMORY * self._products + ratio * known
        (fixed, cross), (_, square) = self._squares
        rest = fixed * square - cross * cross
        # Identical steps do not separate the two unknowns.
        if rest > 1e-6 * fixed * square:
            found = (fixed * self._products[1] - cross * self._products[0]) / rest
            self.seconds = max(0.0, float(found))


class DraftCounts:
    """Counts of checked and accepted drafted tokens: by service class for the planner, and in total
    for metrics.

    Attributes:
        checked: drafted tokens that were checked.
        accepted: checked tokens that were accepted.
        lengths: decode steps for which something was drafted, by how many tokens they checked; in
            the buckets of :data:`sluice.scheduling.fleet.state.DRAFT_LENGTHS`.
    """

    def __init__(self) -> None:
        self.rates = AcceptanceRates()
        self.checked = 0
        self.accepted = 0
        self.lengths = [0] * (len(DRAFT_LENGTHS) + 1)

    def observe(self, service_class: str, checked: int, accepted: int) -> None:
        """Count a step of a decode with drafted tokens."""
        self.rates.observe(service_class, checked, accepted)
        self.checked += checked
        self.accepted += accepted
        self.lengths[bisect_left(DRAFT_LENGTHS, checked)] += 1

    def summary(self) -> dict[str, Any]:
        """Fields of the state table's summary."""
        return {
            "drafts_checked": self.checked,
            "drafts_accepted": self.accepted,
            "draft_lengths": self.lengths,
        }
