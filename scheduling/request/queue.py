"""What a policy may know of requests and queue: no prompt text, tokens or output length."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from math import nan
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from sluice.scheduling.request import kernels
from sluice.scheduling.request.deadline import needs_prefill
from sluice.scheduling.request.kernels import (
    ACCEPTANCE,
    DRAFTED,
    FIELDS,
    FIRST_TOKEN,
    LAST_TOKEN,
    LEAST,
    PROGRAM,
    PROMISED,
    TENANT,
    WEIGHT,
    Floats,
    Ints,
)
from sluice.scheduling.request.objective import SLO


class RequestView(NamedTuple):
    """One live request of a replica at one instant, on the caller's monotonic clock.

    Attributes:
        computed_tokens: tokens whose KV is computed; can pass ``prompt_tokens`` in decode.
        pending_tokens: tokens that could be scheduled now, >= 1: the rest of the prefill (after a
            preemption with the generated tokens), or 1 in decode.
        emitted_tokens: output tokens that have left the engine, or are being computed.
        expected_tokens: predicted length of its whole output, tokens; nan if unknown.
        drafted_tokens: not pending: a plan may give a decode from 1 to ``1 + drafted_tokens``.
        acceptance: probability that a draft is right if those before it are; nan if unknown.
        weight: of the tenant's share, > 0.
        program: what its work counts for, such as an agent's session; 0: nothing.
        least_tokens: that its output surely has, where its TPOT is a mean over them; else 0."""

    request_id: str
    slo: SLO
    arrival_s: float
    prompt_tokens: int
    computed_tokens: int
    pending_tokens: int
    emitted_tokens: int = 0
    first_token_s: float | None = None
    kv_blocks: int = 0
    running: bool = False
    last_token_s: float | None = None
    expected_tokens: float = nan
    best_effort: bool = False
    drafted_tokens: int = 0
    acceptance: float = nan
    tenant: int = 0
    weight: float = 1.0
    promised: bool = False
    program: int = 0
    least_tokens: float = 0.0

    @property
    def is_prefill(self) -> bool:
        """See :func:`sluice.scheduling.request.deadline.needs_prefill`."""
        return needs_prefill(self.emitted_tokens, self.pending_tokens)


_objectives = attrgetter("columns")


class QueueView:
    """Every live request of one replica, in order of arrival at the engine: made of views (an
    engine's adapter) or an array (the simulator), and gives both."""

    __slots__ = ("_ids", "_keys", "_requests", "_slos", "attained_s", "table")

    def __init__(self, requests: Sequence[RequestView] = ()) -> None:
        self._requests: Sequence[RequestView] | None = requests
        self.table: Floats = _table(requests)
        """The requests as rows, ``float64[n, FIELDS]``. Read only."""
        self.attained_s: Floats | None = None
        """By row, what program and tenant have attained (``tenancy.attained``); ``None`` where no
        request has a program. A plan notes it."""
        self._keys: Ints | None = None
        self._slos: Sequence[SLO] | Mapping[int, SLO] = ()
        self._ids: Sequence[str] | None = None

    @classmethod
    def of_table(
        cls,
        keys: Ints,
        table: Floats,
        slos: Sequence[SLO] | Mapping[int, SLO],
        ids: Sequence[str] | None = None,
    ) -> QueueView:
        """The queue of ``float64[n, FIELDS]``, C-ordered, by arrival. Default ``ids``: keys as
        text."""
        queue = cls.__new__(cls)
        queue._requests = None
        queue.table = table
        queue.attained_s = None
        queue._keys = keys
        queue._slos = slos
        queue._ids = ids
        return queue

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueView) and tuple(self.requests) == tuple(other.requests)

    __hash__ = None  # type: ignore[assignment]

    @property
    def requests(self) -> Sequence[RequestView]:
        """The requests as views."""
        if self._requests is None:
            assert self._keys is not None
            keys = self._keys.tolist()
            ids = map(str, keys) if self._ids is None else self._ids
            self._requests = [
                _view(request_id, row, self._slos[key])
                for request_id, key, row in zip(ids, keys, self.table.tolist(), strict=True)
            ]
        return self._requests

    @property
    def keys(self) -> Ints:
        """``int64[n]``: a number per request that does not change while it lives."""
        if self._keys is None:
            assert self._requests is not None
            self._keys = np.array([hash(r.request_id) for r in self._requests], dtype=np.int64)
        return self._keys

    def select(self, rows: Ints) -> QueueView:
        """The queue of the requests in ``rows``, in that order. ``O(rows)``."""
        queue = QueueView.__new__(QueueView)
        queue._requests = None
        if self._requests is not None:
            requests = self._requests
            queue._requests = [requests[row] for row in rows.tolist()]
        queue.table = self.table[rows]
        queue.attained_s = None if self.attained_s is None else self.attained_s[rows]
        queue._keys = None if self._keys is None else self._keys[rows]
        queue._slos = self._slos
        queue._ids = None if self._ids is None else [self._ids[row] for row in rows.tolist()]
        return queue

    def request_ids(self, rows: Ints) -> list[str]:
        """The ids of the requests in ``rows``."""
        if self._ids is not None:
            return [self._ids[row] for row in rows.tolist()]
        if self._requests is None:
            assert self._keys is not None
            return list(map(str, self._keys[rows].tolist()))
        requests = self._requests
        return [requests[row].request_id for row in rows.tolist()]


def _table(requests: Sequence[RequestView]) -> Floats:
    count = len(requests)
    table = np.empty((count, FIELDS))
    if not count:
        return table
    # Transposed tuples and one packed string are the fastest way from objects to an array.
    (_, slos, arrival, prompt, computed, pending, emitted, first, blocks, running, last, expected,
     best_effort, drafted, acceptance, tenants, weights, promised, programs, least) = zip(
        *requests, strict=True)  # fmt: skip
    objectives = zip(*map(_objectives, slos), strict=True)
    numbers = chain(arrival, *objectives, prompt, computed, pending, emitted, blocks, running)
    packed = struct.pack(f"{DRAFTED * count}d", *numbers, *expected, *best_effort)
    table[:, :DRAFTED] = np.frombuffer(packed).reshape(DRAFTED, count).T
    speculates = any(drafted)
    # Most engines never draft: these two are not to cost them anything.
    table[:, DRAFTED] = drafted if speculates else 0.0
    table[:, ACCEPTANCE] = acceptance if speculates else nan
    # The same for those without several tenants.
    shared = any(tenants)
    table[:, TENANT] = tenants if shared else 0.0
    table[:, WEIGHT] = weights if shared else 1.0
    table[:, PROMISED] = promised
    table[:, PROGRAM] = programs
    table[:, LEAST] = least
    # None becomes nan.
    table[:, FIRST_TOKEN] = np.array(first, np.float64)
    table[:, LAST_TOKEN] = np.array(last, np.float64)
    return table


def _view(request_id: str, row: list[float], slo: SLO) -> RequestView:
    first_s, last_s = row[kernels.FIRST_TOKEN], row[kernels.LAST_TOKEN]
    return RequestView(
        request_id,
        slo,
        row[kernels.ARRIVAL],
        int(row[kernels.PROMPT]),
        int(row[kernels.COMPUTED]),
        int(row[kernels.PENDING]),
        int(row[kernels.EMITTED]),
        None if first_s != first_s else first_s,
        int(row[kernels.KV_BLOCKS]),
        row[kernels.RUNNING] > 0,
        None if last_s != last_s else last_s,
        row[kernels.EXPECTED],
        row[kernels.BEST_EFFORT] > 0,
        int(row[kernels.DRAFTED]),
        row[kernels.ACCEPTANCE],
        int(row[TENANT]),
        row[WEIGHT],
        row[kernels.PROMISED] > 0,
        int(row[PROGRAM]),
        row[LEAST],
    )


def row_of(
    slo: SLO,
    arrival_s: float,
    prompt_tokens: int,
    expected_tokens: float = nan,
    best_effort: bool = False,
    tenant: int = 0,
    weight: float = 1.0,
    program: int = 0,
) -> list[float]:
    """The row of a request that has just arrived, ``FIELDS`` numbers."""
    row = [0.0] * FIELDS
    row[kernels.ARRIVAL] = arrival_s
    row[kernels.TTFT : kernels.PRIORITY + 1] = slo.columns
    row[kernels.PROMPT] = row[kernels.PENDING] = prompt_tokens
    row[kernels.FIRST_TOKEN] = row[kernels.LAST_TOKEN] = nan
    row[kernels.EXPECTED] = expected_tokens
    row[kernels.BEST_EFFORT] = best_effort
    row[kernels.ACCEPTANCE] = nan
    row[TENANT], row[WEIGHT], row[PROGRAM] = tenant, weight, program
    return row


def begin_stage(row: Floats, slo: SLO, arrival_s: float, tokens: int, left_s: float = nan) -> None:
    """Change ``row`` to the request's next stage after ``tokens``: to a policy another request.
    ``left_s``: when some of its tokens left with the last one before it; nan: none did."""
    row[kernels.ARRIVAL] = arrival_s
    row[kernels.TTFT : kernels.PRIORITY + 1] = slo.columns
    row[kernels.PROMPT] += tokens
    row[kernels.EMITTED] -= tokens
    row[kernels.EXPECTED] -= tokens
    row[LEAST] = 0.0
    row[FIRST_TOKEN] = row[LAST_TOKEN] = left_s
