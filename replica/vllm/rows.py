"""vLLM's live requests as the rows that a batch policy plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

import numpy as np
from vllm.v1.request import Request, RequestStatus

from sluice.replica.scheduler.local_scheduler import LocalScheduler, TrackedRequest
from sluice.replica.scheduler.row_counts import (
    COUNTS,
    IN_FLIGHT,
    KNOWN,
    PLACE,
    changed_rows,
    emit,
    queue_rows,
)
from sluice.replica.scheduler.speculation import PlannedDrafts
from sluice.replica.scheduler.state_table import ChangedRows
from sluice.replica.vllm.loaded_kv import ExternalKv, IncomingKv
from sluice.replica.vllm.prefix_cache import PrefixHits
from sluice.scheduling.request.kernels import (
    ACCEPTANCE,
    COMPUTED,
    DRAFTED,
    EMITTED,
    EXPECTED,
    FIELDS,
    KV_BLOCKS,
    LAST_TOKEN,
    PENDING,
    PROMPT,
    RUNNING,
    Floats,
    Ints,
)
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.queue import QueueView, begin_stage

_COULD_RUN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_RUNNING, _WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
_FIRST_ROWS = 64


class RequestRows:
    """The rows of a scheduler's live requests, in order of arrival at the engine.

    A step has hundreds, and Python per request is most of its cost: what seldom changes is kept,
    and counts are read for all at once. Tokens in the prefix cache or in a KV transfer count as
    computed. All blocks of a running request count as its own: shared ones become free with their
    last user only, so vLLM may preempt more than was planned."""

    def __init__(
        self,
        scheduler: Any,
        local: LocalScheduler,
        hits: PrefixHits,
        incoming: IncomingKv,
        external: ExternalKv,
        drafts: PlannedDrafts | None,
    ) -> None:
        self._scheduler = scheduler
        self._local = local
        self._hits = hits
        self._incoming = incoming
        self._external = external
        self._drafts = drafts
        self._block = scheduler.block_size
        self._longest = scheduler.max_model_len - 1
        self._pipelined = scheduler.parallel_config.pipeline_parallel_size > 1
        # Rows are added behind the last one. The row of a request that has left stays until there
        # is no space behind the last.
        self._places: dict[str, int] = {}
        self._ids: list[str] = []
        self._table = np.empty((_FIRST_ROWS, FIELDS))
        self._keys = np.empty(_FIRST_ROWS, np.int64)
        self._slots = np.empty(_FIRST_ROWS, np.int64)
        # The most tokens that its prompt and its output can have.
        self._most = np.empty(_FIRST_ROWS)
        self._slos: dict[int, SLO] = {}
        # The counts of waiting requests, and the pass in which each was read; 0: not yet.
        self._waits = np.zeros((_FIRST_ROWS, COUNTS), np.int64)
        self._read_at = np.zeros(_FIRST_ROWS, np.int64)
        self._pass = 0

    def begin(self, request: Request, tracked: TrackedRequest) -> None:
        """A request arrived. ``O(1)``, amortized."""
        if len(self._ids) == len(self._table):
            self._make_space()
        request_id, place = request.request_id, len(self._ids)
        self._ids.append(request_id)
        self._places[request_id] = place
        self._table[place] = tracked.row(request.num_prompt_tokens)
        self._keys[place] = key = hash(request_id)
        self._slos[key] = tracked.slo
        self._slots[place] = tracked.slot
        self._most[place] = request.num_prompt_tokens + request.max_tokens
        self._read_at[place] = 0

    def _make_space(self) -> None:
        """Drop the rows of requests that have left, and double the space if they are few."""
        kept = list(self._places.values())
        size = len(self._table) * (2 if 2 * len(kept) > len(self._table) else 1)
        for name in ("_table", "_keys", "_slots", "_most", "_waits", "_read_at"):
            before = getattr(self, name)
            after = np.empty((size, *before.shape[1:]), before.dtype)
            after[: len(kept)] = before[kept]
            setattr(self, name, after)
        self._ids = list(self._places)
        self._places = {request_id: place for place, request_id in enumerate(self._ids)}

    def forget(self, request_id: str) -> None:
        """A request left. ``O(1)``."""
        del self._slos[int(self._keys[self._places.pop(request_id)])]

    def emitted(self, request_ids: Sequence[str], now_s: float) -> None:
        """Tokens of these requests left the engine; unknown ids are ignored."""
        places = self._places
        left = [places[each] for each in request_ids if each in places]
        emit(self._table, np.array(left, np.int64), now_s)

    def begin_stage(self, request_id: str, tracked: TrackedRequest, tokens: int) -> None:
        """A request is in another stage, after ``tokens`` tokens of the one before."""
        place = self._places[request_id]
        row = self._table[place]
        assert tracked.stages is not None
        # Tokens that left together may be of several stages.
        left_s = float(row[LAST_TOKEN]) if tracked.stages.position.tokens else nan
        begin_stage(row, tracked.slo, tracked.arrival_s, tokens, left_s)
        self._slos[int(self._keys[place])] = tracked.slo

    def queue(self, busy_until_s: float) -> QueueView:
        """Every request that could run now. ``O(live requests)``."""
        if answered := self._external.take_answers(self._cached):
            self._read_at[[self._places[each] for each in answered]] = 0
            self._local.publish(kv_answer_s=self._external.answer_s)
        live = self._scheduler.requests.values()
        running = [request for request in live if request.status is _RUNNING]
        if self._pipelined:
            running = [request for request in running if not self._paused(request)]
        waiting: list[Request] = []
        if len(running) < len(live):
            others = (request for request in live if request.status is not _RUNNING)
            waiting = [request for request in others if self._could_run(request)]
        runs = self._counts(running)
        # What is preempted is looked up again.
        self._read_at[runs[:, PLACE]] = 0
        places, table, outgrown = queue_rows(
            self._table,
            self._most,
            runs,
            self._waiting_counts(waiting),
            (self._longest, self._block),
            busy_until_s,
        )
        ids = [self._ids[place] for place in places.tolist()]
        for row in outgrown.tolist():
            table[row, EXPECTED] = self._prolong(ids[row], int(table[row, EMITTED]))
        if self._drafts is not None:
            self._offer_drafts(table, ids)
        return QueueView.of_table(self._keys[places], table, self._slos, ids)

    def _counts(self, requests: Iterable[Request]) -> Ints:
        """``int64[n, COUNTS]`` of requests."""
        places = self._places
        counts = [
            (
                places[request.request_id],
                request.num_computed_tokens,
                request.num_tokens,
                request.num_output_placeholders,
                0,
            )
            for request in requests
        ]
        return np.array(counts, np.int64).reshape(-1, COUNTS)

    def _waiting_counts(self, requests: Sequence[Request]) -> Ints:
        """``_counts`` of waiting requests, less what need not be computed; most is kept."""
        if not requests:
            return self._waits[:0]
        self._pass += 1
        again = self._hits.begin_pass()
        places = np.array([self._places[each.request_id] for each in requests], np.int64)
        read_at = self._read_at[places]
        due = read_at == 0
        due[np.flatnonzero(~due & (read_at <= self._pass - 4))[:again]] = True
        due[[n for n, request in enumerate(requests) if request.num_computed_tokens]] = True
        for n in np.flatnonzero(due).tolist():
            self._read(requests[n], int(places[n]))
        counts = self._waits[places]
        counts[:, PLACE] = places
        # Output that was in flight when it was preempted can still come.
        for n in [n for n, request in enumerate(requests) if request.status is not _WAITING]:
            counts[n, KNOWN] = requests[n].num_tokens
            counts[n, IN_FLIGHT] = requests[n].num_output_placeholders
        return counts

    def _cached(self, request: Request) -> int:
        """Tokens of a waiting request in the prefix cache, in whole blocks."""
        hit = self._hits.of(request)
        return 0 if hit is None else hit.tokens // self._block * self._block

    def _prolong(self, request_id: str, emitted: int) -> float:
        """A request has emitted what it was expected to: its expected tokens from now on."""
        tracked = self._local.requests[request_id]
        self._local.prolong(tracked, tracked.begun + emitted)
        expected = tracked.expected_tokens - tracked.begun
        self._table[self._places[request_id], EXPECTED] = expected
        return expected

    def _paused(self, request: Request) -> bool:
        """Whether vLLM leaves it out of the next step, as asynchronous pipelines do in turn."""
        step: int = getattr(request, "next_decode_eligible_step", 0)
        return step > 0 and self._scheduler.current_step + 1 < step

    def _could_run(self, request: Request) -> bool:
        if request.status in _COULD_RUN:
            return not (_has_stale_output(request) or self._external.is_awaited(request.request_id))
        return self._incoming.arrived(request)

    def _read(self, request: Request, place: int) -> None:
        """Note the tokens of a waiting request, how many need not be computed, and its blocks."""
        computed, known, last = request.num_computed_tokens, request.num_tokens, 0
        if computed == 0:
            hit = self._hits.of(request)
            if hit is None and self._read_at[place]:
                return
            computed, blocks = hit or (0, 0)
            held = self._external.of(request.request_id)
            if self._incoming.awaits(request, computed) or (held and held.beside):
                computed = known  # to plan it starts the load
            elif held:
                computed += held.tokens
            elif hit is not None:
                last = self._pass
        else:
            # Its KV came from another engine.
            blocks = -(-computed // self._block)
        # The last token is always computed, for its logits.
        self._waits[place] = place, min(computed, known - 1), known, 0, blocks
        self._read_at[place] = last

    def _offer_drafts(self, table: Floats, ids: Sequence[str]) -> None:
        """Add how many tokens were drafted for each decode, and how likely one is accepted."""
        drafts = self._drafts
        assert drafts is not None
        drafts.begin_pass()
        for place in np.flatnonzero(table[:, RUNNING]).tolist():
            request_id, row = ids[place], table[place]
            row[KV_BLOCKS] = drafts.held_blocks(request_id)
            if row[PENDING] != 1:
                continue
            drafted = drafts.offer(self._scheduler.requests[request_id])
            # Before a stage's first token there is no decode to check them.
            if drafted and row[EMITTED]:
                tracked = self._local.requests[request_id]
                row[DRAFTED] = drafted
                row[ACCEPTANCE] = self._local.drafts.rates.rate(tracked.slo.service_class)

    def changed(self, request_ids: Iterable[str]) -> ChangedRows:
        """What the state table is to say of these requests; unknown ids are ignored."""
        requests, places = self._scheduler.requests, self._places
        live = [requests[each] for each in request_ids if each in places]
        counts = self._counts(live)
        runs = np.array([request.status is _RUNNING for request in live], np.int64)
        table = changed_rows(self._table, counts, runs, self._block)
        return ChangedRows(self._slots[counts[:, PLACE]], table)

    def awaited(self, request_id: str) -> ChangedRows:
        """Counts of a request whose KV comes from elsewhere: readers must not see a prefill."""
        place = self._places[request_id]
        table = self._table[place : place + 1].copy()
        table[:, COMPUTED] = upto = self._incoming.upto(request_id)
        table[:, PENDING] = table[:, PROMPT] - upto
        return ChangedRows(self._slots[place : place + 1], table)


def _has_stale_output(request: Request) -> bool:
    """Whether it was preempted with output in flight: vLLM (from 0.27.1) does not resume it before
    that is delivered. Older versions have it before the next batch but one."""
    stale: int = getattr(request, "num_stale_output_tokens", 0)
    return stale > 0 and not getattr(request, "drop_stale_output", False)
