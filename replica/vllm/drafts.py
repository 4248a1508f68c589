"""Drafted tokens in vLLM's scheduler: how many a decode could check, how many it did, and how many
are drafted next.

vLLM drafts behind a step and checks the drafts in the request's next one: ``1 + d`` tokens of a
decode are its next one and ``d`` drafts, of which it drops what a cap leaves out. vLLM takes the
number of tokens to draft from a table by batch size, which this module replaces by
:class:`~sluice.replica.scheduler.speculation.DraftLength`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice.replica.scheduler.local_scheduler import LocalScheduler
from sluice.replica.scheduler.speculation import DraftLength
from sluice.scheduling.batching import PlannedTokens


class PlannedDrafts:
    """The drafts of one engine's requests.

    Per step: :meth:`offer` for each decode in a pass over the requests, :meth:`planned` with the
    plan, :meth:`checked` for the drafts that the step checks, and :meth:`learn` with its result.

    Args:
        scheduler: vLLM's; it must decode speculatively, and wait for each batch.
    """

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
        """Max tokens that a draft model drafts for one request in the step that was planned last;
        ``None`` without a draft model."""
        return None if self._length.free else self._length.length

    def begin_pass(self) -> None:
        """Start a pass over the requests."""
        self._offered = {}
        self._decodes = False

    def offer(self, request: Any) -> int:
        """How many drafted tokens the next step of a running decode could check. Drafts beyond its
        max output or total length do not count."""
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
        """KV blocks of a running request: they may be more than its computed tokens fill, after
        drafts that were wrong."""
        return len(self._blocks.get(request_id, ()))

    def tokens(self, most: int, sequences: int) -> int:
        """Max new tokens of a batch of ``sequences`` sequences, as drafting takes slots of its
        input."""
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

    def learn(self, checked: Mapping[str, int], runner_output: Any, local: LocalScheduler) -> None:
        """A batch is over; vLLM has not processed its result yet, which cuts tokens after a stop.

        Args:
            checked: of that batch, by :meth:`checked`.
            runner_output: its result.
            local: the scheduler that tracks the requests.
        """
        sampled = runner_output.sampled_token_ids
        for request_id, drafts in checked.items():
            tracked = local.requests.get(request_id)
            index = runner_output.req_id_to_index.get(request_id)
            if tracked is None or index is None or not sampled:
                continue  # the request has left meanwhile
            accepted = min(drafts, max(0, len(sampled[index]) - 1))
            local.drafts.observe(tracked.slo.service_class, drafts, accepted)
