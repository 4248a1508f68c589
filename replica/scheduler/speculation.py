"""Speculative decoding in an engine: configuration, draft lengths, drafting time, accepted counts.

vLLM drafts behind a step and checks in the request's next one ``1 + d`` tokens: the next and ``d``
drafts, of which it drops what a cap leaves out. The plan decides how many are checked."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sluice.scheduling.batching import PlannedTokens
from sluice.scheduling.fleet.state import DRAFT_LENGTHS
from sluice.scheduling.latency.speculation import AcceptanceRates

MAX_DRAFTED = 32  # Max tokens that an engine may draft for one step of a request

BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
"""vLLM's setting of draft lengths by batch size. Sluice sets it, and replaces its table."""

FREE_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Methods that look drafts up, in negligible time; the others run a draft model."""

_MEMORY = 0.98


def with_all_lengths(given: Any) -> dict[str, Any]:
    """vLLM's ``speculative-config`` with every length up to the max, so that vLLM is prepared for
    each; which batch size has which does not matter. Raises ValueError: ``given`` is wrong."""
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
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MAX_DRAFTED:
        raise ValueError(
            "speculative-config needs num_speculative_tokens, the most tokens to draft: "
            f"1 to {MAX_DRAFTED}, got {most!r}"
        )
    return {**config, BY_BATCH_SIZE: [[each + 1, each + 1, each] for each in range(most + 1)]}


class DraftLength:
    """How many tokens the engine drafts in the next step, in place of vLLM's table by batch size.

    Looking up drafts is free: always the max. A draft model drafts one token more than the last
    plan took, none if that took none, and the max in every eighth step with decodes, to check
    whether drafts pay again."""

    def __init__(self, method: str, most: int) -> None:
        self.free = method in FREE_METHODS
        self.length = most
        self._most = most
        self._idle = 0

    def __getitem__(self, batch_size: int) -> int:
        return self.length

    def planned(self, decodes: bool, offered: bool, taken: int) -> None:
        """A planned batch: has it ``decodes``, ``offered`` drafts, and how many of one decode."""
        if self.free:
            return
        if offered:
            self._idle = 0
            self.length = min(taken + 1, self._most) if taken else 0
        elif decodes and not self.length:
            self._idle += 1
            if self._idle >= 8:
                self.length = self._most


class DraftTime:
    """Time to draft one token for every decode, by least squares on ``step = factor * predicted +
    drafted * time`` with decreasing weight of older steps. ``O(1)``."""

    def __init__(self) -> None:
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)
        self.seconds = 0.0
        """Seconds per drafted token, >= 0."""

    def observe(self, predicted_s: float, drafted: int, seconds: float) -> None:
        """A step of ``predicted_s`` (> 0) took ``seconds``, with ``drafted`` tokens per decode."""
        # A step that the machine delayed must not weigh as much as hundreds.
        ratio = min(seconds / predicted_s, 4.0)
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
    """Counts of ``checked`` and ``accepted`` drafts by class; ``lengths``: steps by drafts."""

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


class PlannedDrafts:
    """The drafts of one engine's requests. Per step: ``offer`` for each decode, ``planned``,
    ``checked``, and ``learn`` with the result. The engine must wait for each batch."""

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.vllm_config.speculative_config
        self._length = DraftLength(config.method, scheduler.num_spec_tokens)
        scheduler.dynamic_sd_lookup = self._length
        # Tokens after those of the batch for which the drafter's KV needs slots.
        self.lookahead: int = scheduler.num_lookahead_tokens
        self._slots: int = config.max_num_new_slots_for_drafting
        self._batched: int = scheduler.scheduler_config.max_num_batched_tokens
        self._longest: int = scheduler.max_model_len - 1
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks: Mapping[str, Any] = managers[0].req_to_blocks
        self._offered: dict[str, int] = {}
        self._decodes = False

    @property
    def drafted(self) -> int | None:
        """Max tokens drafted for one request in the step planned last; ``None``: no draft model."""
        return None if self._length.free else self._length.length

    def begin_pass(self) -> None:
        """Start a pass over the requests."""
        self._offered = {}
        self._decodes = False

    def offer(self, request: Any) -> int:
        """Drafts that a decode's next step could check within its output and length limits."""
        self._decodes = True
        drafts: int = min(
            len(request.spec_token_ids),
            self._longest - request.num_tokens,
            request.max_tokens - request.num_output_tokens - 1,
        )
        if drafts <= 0:
            return 0
        self._offered[request.request_id] = drafts
        return drafts

    def held_blocks(self, request_id: str) -> int:
        """KV blocks of a running request: wrong drafts may leave more than its tokens fill."""
        return len(self._blocks.get(request_id, ()))

    def tokens(self, most: int, sequences: int) -> int:
        """Max new tokens of a batch; drafting takes slots of its input for each sequence."""
        return max(1, min(most, self._batched - self._slots * sequences))

    def planned(self, entries: Iterable[PlannedTokens]) -> None:
        """A batch has been planned; vLLM has not been asked for it yet."""
        taken = [entry.tokens - 1 for entry in entries if entry.request_id in self._offered]
        self._length.planned(self._decodes, bool(taken), max(taken, default=0))

    def checked(self, scheduler_output: Any) -> dict[str, int]:
        """How many drafted tokens a batch checks, by request; only requests that had some."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return {
            request_id: len(drafts.get(request_id, ()))
            for request_id in self._offered
            if request_id in scheduler_output.num_scheduled_tokens
        }

    def learn(
        self,
        checked: Mapping[str, int],
        runner_output: Any,
        requests: Mapping[str, Any],
        counts: DraftCounts,
    ) -> None:
        """A batch is over; vLLM has yet to process its result, and to cut tokens after a stop."""
        sampled = runner_output.sampled_token_ids
        for request_id, drafts in checked.items():
            tracked = requests.get(request_id)
            index = runner_output.req_id_to_index.get(request_id)
            if tracked is None or index is None or not sampled:
                continue  # the request has left meanwhile
            accepted = min(drafts, max(0, len(sampled[index]) - 1))
            counts.observe(tracked.slo.service_class, drafts, accepted)
