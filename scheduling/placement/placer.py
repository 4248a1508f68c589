"""One decision: what is promised, where the request goes, and what that takes of the fleet; for the
controller and the simulator alike."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from sluice.scheduling.admission.base import (
    TRANSFER_STEPS,
    AdmissionPolicy,
    Constraint,
    DecodeChoice,
    Promises,
    together,
)
from sluice.scheduling.admission.room import MIN_WAIT_S
from sluice.scheduling.admission.slos_serve.selection import MAX_NEW
from sluice.scheduling.autoscaling.load import Demand
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.ranks import replica_of
from sluice.scheduling.fleet.report import Reservation
from sluice.scheduling.fleet.rows import (
    BATCH_S,
    BEST_EFFORT_S,
    DECODE_S,
    FIXED_S,
    PREFILL_S,
    prefill_on,
    work_on,
)
from sluice.scheduling.placement.calibration import Calibration
from sluice.scheduling.placement.cold_start import ColdStart
from sluice.scheduling.placement.output_lengths import OutputLengths
from sluice.scheduling.placement.quotes import (
    MIN_PREDICTED_S,
    VALID_S,
    Held,
    Offer,
    Prediction,
    Quote,
    Quotes,
)
from sluice.scheduling.placement.retry_after import RetryAfter
from sluice.scheduling.request.deadline import paced
from sluice.scheduling.request.job import (
    DECLINED,
    NO_REPLICA,
    PLACED,
    STAYS,
    UNATTAINABLE,
    Job,
    RouteDecision,
    RouteQuery,
    Tier,
)
from sluice.scheduling.request.kernels import Floats, Ints, compiled, most_work_s
from sluice.scheduling.request.objective import SLO, Times
from sluice.scheduling.request.stages import later_of
from sluice.scheduling.roles import WHOLE
from sluice.scheduling.routing.base import RoutingPolicy
from sluice.scheduling.tenancy.fair_shares import FairShares

# A request on replicas that could serve it: when it is due, and what it takes of them.


def job_of(
    fleet: Fleet,
    query: RouteQuery,
    rows: Ints,
    now_s: float,
    output_tokens: float,
    kv_transfer_s: float | None = None,
    moved: bool = False,
) -> Job:
    """The query on ``rows``. ``kv_transfer_s``: from the end of its prompt on a prefill replica to
    its first token elsewhere; ``None``: prefill replicas would serve it whole.

    Loading KV from the host or from another replica takes no compute here and delays only this
    prompt, so it counts only where it is faster than computing the tokens. Another replica gives
    what it has cached in a step of its own, after the one under way."""
    # The edge's count of the prompt is an estimate, too.
    prompt, moved = float(query.prompt_tokens), moved or query.brings_kv
    cached, splits = np.zeros(len(rows)), np.zeros(len(rows), np.bool_)
    if moved:
        cached += max(0.0, prompt - 1.0)
        work_s, lead_s = work_on(fleet.pieces, rows, prompt, cached), np.zeros(len(rows))
    else:
        if query.prefix:
            cached = cached_on(fleet, query, rows)
        work_s, lead_s = prefill_on(fleet.figures, fleet.pieces, rows, prompt, cached)
        if query.prefix and len(fleet.prefixes.hosted):
            hosted, token_s = fleet.prefixes.hosted_tokens(query.prefix, rows)
            if query.message_ends:
                ends, _ = fleet.prefixes.hosted_tokens(query.message_ends, rows)
                np.maximum(hosted, ends, out=hosted)
            loaded = np.maximum(np.minimum(hosted, prompt) - cached, 0.0)
            _load(fleet, rows, prompt, (cached, work_s, lead_s), loaded, loaded * token_s)
        if query.fetches_kv and kv_transfer_s is None:
            giver, tokens = giver_of(fleet, query, now_s)
            fetched = np.maximum(tokens - cached, 0.0)
            if fleet.has_roles:
                fetched[fleet.are(rows, "prefill")] = 0.0  # these only give
            fetch_s = fleet.transfer.fixed_s + fleet.transfer.token_s * fetched
            fetch_s += TRANSFER_STEPS * longest_step_s(fleet, giver)
            _load(fleet, rows, prompt, (cached, work_s, lead_s), fetched, fetch_s)
    if query.brings_kv:
        lead_s[:] = fleet.transfer.seconds(query.prompt_tokens)
    if kv_transfer_s is not None:
        splits = fleet.are(rows, "prefill")
        lead_s[splits] = kv_transfer_s
    ttft_s, tpot_s, e2e_s, priority = query.slo.columns
    if e2e_s < inf:
        ttft_s, tpot_s = paced(ttft_s, tpot_s, e2e_s, output_tokens)
    return Job(
        query, rows, cached, work_s, lead_s, splits, now_s, now_s - query.waited_s + ttft_s,
        float(query.waited_s), tpot_s, priority, prompt, output_tokens, moved,
    )  # fmt: skip


def cached_on(fleet: Fleet, query: RouteQuery, rows: Ints) -> Floats:
    """``float64[n]``: tokens of the prompt that each of ``rows`` has in its KV cache."""
    prompt = float(query.prompt_tokens)
    cached = fleet.prefixes.cached_tokens(query.prefix, rows, prompt)
    if query.message_ends:
        ends = fleet.prefixes.cached_tokens(query.message_ends, rows, prompt)
        np.maximum(cached, ends, out=cached)
    return cached


def giver_of(fleet: Fleet, query: RouteQuery, now_s: float) -> tuple[int, float]:
    """The row of the replica that has most of the prompt cached, and how many tokens it could give;
    0 where it is one that has failed the request."""
    rows = fleet.candidates(now_s)
    cached = cached_on(fleet, query, rows)
    place = int(cached.argmax())
    failed = replica_of(fleet.ids[rows[place]]) in map(replica_of, query.avoid)
    return int(rows[place]), 0.0 if failed else min(float(cached[place]), float(query.fetches_kv))


MAX_BATCH_TOKENS: Final = 8_192.0
"""Most prompt tokens of a step that is not bounded by decodes: vLLM's default on large GPUs."""


def longest_step_s(fleet: Fleet, row: int) -> float:
    """Predicted time of a step of this replica, if it has as many of its prompts as it may."""
    figures = fleet.figures[row]
    least_s = figures[FIXED_S] + figures[DECODE_S]
    full_s = least_s + most_work_s(fleet.pieces[row], MAX_BATCH_TOKENS, 0.0)
    all_s = least_s + figures[PREFILL_S] + figures[BEST_EFFORT_S]
    return min(all_s, full_s, max(least_s, figures[BATCH_S]))


def _load(
    fleet: Fleet,
    rows: Ints,
    prompt: float,
    columns: tuple[Floats, Floats, Floats],
    loaded: Floats,
    load_s: Floats,
) -> None:
    """Count ``loaded`` more tokens as cached where to load them, in ``load_s``, is faster than to
    compute them. ``columns``: what is cached, the work and the lead, which are changed."""
    cached, work_s, lead_s = columns
    less_s = work_on(fleet.pieces, rows, prompt, cached + loaded)
    pays = (loaded > 0) & (load_s + less_s < work_s)
    cached[pays] += loaded[pays]
    work_s[pays] = less_s[pays]
    lead_s[pays] += load_s[pays]


def reservation_of(job: Job, chosen: int, ids: Sequence[str], promised: bool) -> Reservation:
    """The reservation of a job at its replica number ``chosen``; ``ids`` are the replicas of all
    rows."""
    cached = float(job.cached_tokens[chosen])
    new = max(1.0, job.prompt_tokens - cached)
    made = Reservation(
        ids[job.rows[chosen]], job.now_s, promised, new, cached,
        job.prompt_tokens if job.moved else new,
        job.due_s, job.tpot_s, job.priority, job.output_tokens,
    )  # fmt: skip
    stages = job.query.slo.stages
    if stages:
        _, later_stages, later_tokens = later_of(stages, 0)
        made = made._replace(later_stages=float(later_stages), later_tokens=float(later_tokens))
    return made


# An end-to-end time as a first token and a pace.
#
# Admission and engines plan first tokens and paces. An end-to-end time says neither, so it is
# shared out: ``TTFT + (tokens - 1) * TPOT`` is the end-to-end time, where ``tokens`` bounds the
# length of the output. A replica that meets both meets the end-to-end time, if the output is no
# longer than that.
#
# How it is shared out is ours: both get as many times what a replica would take for them now, but
# the first token no more than :data:`MAX_FIRST` times; the pace gets the rest. A pace is what
# costs others' time, as each step of a decode has a fixed part, so slack is worth more there.
#
# This is for guaranteed requests, where the length is a bound and the replicas' work is known.
# Code that only expects a length, for requests without a guarantee, converts an end-to-end time by
# :func:`sluice.scheduling.request.deadline.paced`.

MIN_SPARE = 1.25
"""The shares follow a replica's current load if it would end this many times sooner than required.
Otherwise they are those of an idle replica, so that "never" and "not now" differ in admission."""

MAX_FIRST = 2.0
"""The first token gets at most this many times its predicted time, so that slack goes to the
TPOT."""

MIN_FIRST = 0.1
"""But at least this share of the whole time, where that is ample: a short prompt of a long answer
need not run at once, and may go to a busier replica."""

_MIN_S = 1e-9


def shared_out(query: RouteQuery, tokens: float, fleet: Fleet, rows: Ints) -> SLO:
    """The objective of ``query`` with its end-to-end time shared out as at the replica that would
    end first; itself where it states none. ``tokens`` bounds the output. ``O(rows)``, vectorised.

    A tighter stated TTFT or TPOT stays and leaves the rest to the other. The end-to-end time is
    gone from the result: a replica that expects a longer output would make earlier deadlines of it.
    """
    ttft_s, tpot_s, e2e_s, _ = query.slo.columns
    if e2e_s == inf:
        return query.slo
    later = max(0.0, tokens - 1.0)
    busy_s, busy_first_s, idle_s, idle_first_s = quickest(
        fleet.figures, fleet.pieces, rows, float(query.prompt_tokens), later
    )
    left_s = e2e_s - query.waited_s
    if left_s >= MIN_SPARE * busy_s:
        first_s = min(left_s / busy_s, MAX_FIRST) * busy_first_s
        first = query.waited_s + max(first_s, MIN_FIRST * left_s)
    else:
        first = min(e2e_s / idle_s, MAX_FIRST) * idle_first_s
    if not 0.0 < first < inf:
        # Of a model of extreme figures: what it cannot predict cannot be shared out.
        return query.slo
    if later == 0.0:
        return query.slo.with_times((min(ttft_s, e2e_s), query.slo.tpot_s, None))
    pace = (e2e_s - first) / later
    if ttft_s < first:
        first, pace = ttft_s, (e2e_s - ttft_s) / later
    if tpot_s < pace:
        pace, first = tpot_s, min(ttft_s, e2e_s - later * tpot_s)
    return query.slo.with_times((max(first, _MIN_S), max(pace, _MIN_S), None))


@compiled
def quickest(
    figures: Floats, pieces: Floats, rows: Ints, prompt_tokens: float, later: float
) -> tuple[float, float, float, float]:
    """Predicted time of the answer, with ``later`` tokens behind the first, at the replica that
    would end first, and of its first token; then both as if all were idle. Nothing counts as
    cached."""
    busy_s = idle_s = inf
    busy_first_s = idle_first_s = 0.0
    for row in rows:
        of = figures[row]
        first_s = of[FIXED_S] + most_work_s(pieces[row], max(1.0, prompt_tokens), 0.0)
        step_s = of[FIXED_S] + most_work_s(pieces[row], 1.0, prompt_tokens + 0.5 * later)
        whole_s = max(first_s + later * step_s, _MIN_S)
        if whole_s < idle_s:
            idle_s, idle_first_s = whole_s, first_s
        first_s += of[PREFILL_S]
        whole_s = max(first_s + later * (step_s + of[DECODE_S]), _MIN_S)
        if whole_s < busy_s:
            busy_s, busy_first_s = whole_s, first_s
    return busy_s, busy_first_s, idle_s, idle_first_s


# Requests that are decided together: those of greatest total priority get the guarantees.
#
# One by one, a request that comes first takes capacity that two others could have shared. Requests
# that wait at the controller together are therefore planned first, without consequences: where not
# all of them could be guaranteed one after another, the admission policy chooses the best set for
# each replica (SLOs-Serve §3.2.1). Then each request is decided as if it were alone, those of the
# set first. So shares of tenants, margins and retry times apply as always, and what the plan
# leaves out gets the capacity that remains.
#
# The paper has a program for one replica, and the next replica tests what the first declined. Ours
# for several replicas: each starts from the requests that it would get one by one, and may
# exchange them for others that no replica has guaranteed. So the set is never worth less than one
# by one, and on one replica none is worth more that the admission policy accepts as a set. In
# another order, one by one can be worth more: a reservation counts up to some milliseconds less
# than a new request.

MAX_TOGETHER: Final = MAX_NEW
"""Maximum number of requests that are decided together."""


class Planned(NamedTuple):
    """When and where to decide on one of several requests: its ``number`` in the order given and
    the ``row`` of the replica that is to promise it; ``None``: the routing policy chooses."""

    number: int
    row: int | None = None


def plan(
    jobs: Iterable[tuple[int, Job]],
    fleet: Fleet,
    admission: AdmissionPolicy,
    choose: Callable[[Job, Fleet], int],
) -> dict[int, int]:
    """The replica's row of each request that is to be promised, by its index; empty where all can
    be promised one by one. Leaves nothing reserved. Takes at most ``MAX_TOGETHER`` jobs, each made
    when the ones before it are reserved."""
    asked: dict[int, Job] = {}
    rows: dict[int, int] = {}
    for index, job in jobs:
        asked[index] = job
        able = np.flatnonzero(admission.promises(job, fleet).holds)
        if len(able):
            chosen = int(able[choose(job.of(able), fleet)])
            rows[index] = int(job.rows[chosen])
            fleet.reserve(job.query.key, reservation_of(job, chosen, fleet.ids, promised=True))
    fleet.release([asked[index].query.key for index in rows])
    if len(rows) == len(asked):
        return {}
    for row in dict.fromkeys(rows.values()):
        here = [
            index for index, job in asked.items() if rows.get(index, row) == row and row in job.rows
        ]
        chosen_here = admission.select(
            [asked[index].of(asked[index].rows == row) for index in here], fleet
        )
        best = [index for index, taken in zip(here, chosen_here.tolist(), strict=True) if taken]
        before = [index for index in here if index in rows]
        if _worth(asked, best) > _worth(asked, before):
            for index in before:
                del rows[index]
            rows.update(dict.fromkeys(best, row))
    return rows


def _worth(asked: dict[int, Job], indexes: list[int]) -> float:
    return sum(asked[index].query.slo.priority for index in indexes)


MAX_OFFER_TESTS: Final = 8
"""Most objectives that are tested for an offer, each farther from the stated one."""

OFFER_STEP: Final = 0.15
"""By which share of the stated one an offered time grows at least from test to test."""


def _farther(slo: SLO, promises: Promises, share: float) -> Times | None:
    """Times farther off than those of ``slo`` by ``share`` at least, where the replica that could
    promise it soonest is bound; ``None``: no other times help."""
    place = int(promises.wait_s.argmin())
    wait_s, binds = promises.wait_s.item(place), promises.binds[place]
    ttft_s, tpot_s, e2e_s = slo.times_s
    if binds == Constraint.SEQUENCES:
        return None
    if binds == Constraint.TPOT or (ttft_s is None and e2e_s is None):
        if tpot_s is not None:
            return ttft_s, tpot_s * (1.0 + share), e2e_s
        return ttft_s, None, None if e2e_s is None else e2e_s * (1.0 + share)
    first_s = min(slo.columns[0], slo.columns[2])
    if wait_s == inf:
        wait_s = max(0.0, promises.ttft_s.item(place) - first_s)
    more_s = max(wait_s, share * first_s)
    later = [None if each is None else each + more_s for each in (ttft_s, e2e_s)]
    return later[0], tpot_s, later[1]


MAX_AWAITED_S = 600.0
"""Longest time for which a reservation waits for another replica to compute the prompt, seconds."""


class DecisionInputs(NamedTuple):
    """The inputs of a decision. They do not change later, so they may be stored.

    Attributes:
        job: the request on each replica that could have been chosen to serve or prefill it.
        ids: replica of each row of the fleet.
        known: number of known replicas, including ineligible ones.
        promises: of each replica of the job; ``None`` where nothing was asked.
        ahead_s: ``float64[n]``, predicted time of all prompts there and of this one, where that
            decided or nothing was promised; else ``None``.
        second: the decode choice, if the request could be split.
        untried: rows of the quarantined replicas that were to be tried.
        waits_s: why nothing was promised, if that is recorded: see :meth:`Placer.waits_s`."""

    job: Job
    ids: Sequence[str]
    known: int
    promises: Promises | None
    ahead_s: Floats | None
    second: DecodeChoice | None = None
    untried: frozenset[int] = frozenset()
    waits_s: Mapping[str, float] | None = None


class _Asked(NamedTuple):
    """What a decision is about: the job, the decode choice if it could be split, the admission
    policy if it is to be promised, its objective, and by when that is planned."""

    job: Job
    second: DecodeChoice | None
    wanted: AdmissionPolicy | None
    stated: SLO
    planned: SLO
    among: int


class _Tested(NamedTuple):
    """What replicas can promise. ``apart``: the job by the plan of each replica with margins of its
    own, by its place in ``job``; ``able``: places in ``job`` that can promise it; ``over_share``:
    only the tenant's share forbids it; ``reserve_tokens``: what others' shares or retries keep."""

    job: Job
    promises: Promises
    apart: dict[int, tuple[Job, SLO]]
    able: Ints
    over_share: bool = False
    reserve_tokens: float = 0.0


_NONE_APART: dict[int, tuple[Job, SLO]] = {}
_NOWHERE: Ints = np.empty(0, np.int64)


class Placer:
    """Decides by one admission and one routing policy, and reserves.

    A request without an objective, or whose objective no replica can promise, is served as best
    effort if it may be, by the replica with the least work ahead, of both tiers. Where not every
    request can be promised, tenants have fair shares (``tenancy.fair_shares``), and new requests
    leave capacity for retries (``placement.retry_after``).

    With prefill/decode disaggregation the decode replica is chosen first, as it does not depend on
    the prefill replica; then mixed and prefill replicas are compared in one decision, each by its
    part. A prefill replica's prefill must end before the first token is due by the KV transfer and
    ``TRANSFER_STEPS``. A request that must be served whole goes to a mixed replica, else to a
    decode replica, else to any.

    Where replicas transfer KV, a turn of a session is cheap on each that can fetch the prefix from
    the one that has it cached, so it moves where that is better with the fetch counted.

    A quarantined replica gets requests, without a promise, only where no other is left; when its
    trial is due, it gets the next one that it could serve. A promised request that moves goes only
    where the rest of its objective can be promised, and else stays without side effects. A running
    stream is decided on as one whose KV arrives after the predicted transfer.

    Args:
        routing: chooses among the replicas that can promise the request; without admission, among
            all.
        admission: ``None``: nothing is promised, and only requests that ask for best effort get it.
        calibration: by how much earlier than due a promise is planned; ``None``: not earlier.
        lengths: observed output lengths; ``None``: none are known.
        cold_start: decides while a model has no replica; ``None``: it always has some."""

    def __init__(
        self,
        fleet: Fleet,
        routing: RoutingPolicy,
        admission: AdmissionPolicy | None,
        calibration: Calibration | None = None,
        lengths: OutputLengths | None = None,
        cold_start: ColdStart | None = None,
    ) -> None:
        self._fleet = fleet
        self._routing = routing
        self._admission = admission
        self.inputs: DecisionInputs | None = None
        """The inputs of the last decision; ``None`` where there was no replica to choose."""
        self._calibration = calibration
        self._lengths = lengths if lengths is not None else OutputLengths()
        self.cold_start = cold_start
        self.demand = Demand()
        """Demand, counted decision by decision."""
        self.shares = FairShares()
        """Fair shares of promised tokens between tenants."""
        self.returns = RetryAfter()
        """Retry times of refused requests."""
        self.quotes = Quotes()
        """What requests will take, by how those before them turned out, and offers."""
        self.explains = False
        """Whether inputs have ``waits_s``; a decision without a promise then takes longer."""

    def order(self, queries: Sequence[RouteQuery], now_s: float) -> list[Planned]:
        """In which order to decide on at most ``MAX_TOGETHER`` waiting queries, and where each is
        to be promised: the best set first (``plan``), or as given where the policy does not choose
        sets, with P/D roles, and for a single query."""
        turns, admission = list(map(Planned, range(len(queries)))), self._admission
        if len(queries) < 2 or admission is None or not admission.selects or self._fleet.has_roles:
            return turns
        asked = (
            (index, made.job)
            for index, query in enumerate(queries)
            if not query.moves_from
            and Tier.GUARANTEED in query.tiers
            and query.slo.stated
            and not isinstance(made := self._asked(query, now_s), RouteDecision)
            and self._fleet.may_promise
        )
        turn = self._routing.turn
        rows = plan(asked, self._fleet, admission, self._routing.choose_able)
        self._routing.turn = turn  # a plan takes none
        best = [Planned(index, row) for index, row in sorted(rows.items())]
        return [*best, *(turn for turn in turns if turn.number not in rows)]

    def place(
        self, query: RouteQuery, now_s: float, at: int | None = None, taken: bool = False
    ) -> RouteDecision:
        """Decide on ``query`` and reserve what it takes. ``at``: a replica's row, which promises it
        if it can (:meth:`order`). ``taken``: what the query takes up has been looked up."""
        self.inputs = None
        if query.takes and not taken:
            return self._take(query, now_s)
        asked = self._asked(query, now_s, at)
        if isinstance(asked, RouteDecision):
            self.demand.arrived += asked.reason != DECLINED
            return asked
        job, second = asked.job, asked.second
        if asked.wanted is not None:
            decision = self._promise(asked, asked.wanted, at)
        elif Tier.GUARANTEED not in query.tiers or self._admission is not None:
            decision = self._best_effort(job, second)
        else:
            self._record(job, None, self._ahead_s(job), second)
            decision = self._place(job, self._choose(job, self._routing.choose), second)
        if decision.reason == DECLINED:  # it will be counted elsewhere
            return decision
        self.demand.arrived += 1
        if not query.moves_from:  # or else it was counted where it was placed first
            self.demand.count(job, decision, self._fleet, second)
        return decision

    def _take(self, query: RouteQuery, now_s: float) -> RouteDecision:
        """Decide on a request that takes up a quote or an offer: where that was held, if it was."""
        held = self.quotes.take(query, now_s)
        if held is None and query.elsewhere:
            return RouteDecision(None, DECLINED)
        if held is None:
            return self.place(query._replace(takes=0), now_s)
        self._fleet.release(held.keys)
        row = self._fleet.row_of.get(held.replica_id)
        decision = self.place(query, now_s, row, taken=True)
        if not held.keys:
            promised = decision.tier is Tier.GUARANTEED
            self.quotes.was_accepted(promised)
            if promised:
                self.returns.took_offer(query, self._lengths.of(query).mean)
        return decision

    def quote(self, query: RouteQuery, now_s: float, hold_s: float = 0.0) -> Quote:
        """What :meth:`place` would decide now, and how long the request would take. Nothing is
        counted or reserved, unless what a promise needs is held for ``hold_s`` under the query's
        keys. Where the request would be refused, the nearest objective that could be promised."""
        turn = self._routing.turn
        try:
            return self._quote(query, now_s, hold_s)
        finally:
            self._routing.turn = turn  # a quote takes none

    def _quote(self, query: RouteQuery, now_s: float, hold_s: float) -> Quote:
        # As of a cell beside others: it does not count as the start of a first replica.
        asked = self._asked(query._replace(elsewhere=True), now_s)
        if isinstance(asked, RouteDecision):
            return Quote(RouteDecision(None, NO_REPLICA))
        job, second, chosen, ttft_s = asked.job, asked.second, -1, None
        if asked.wanted is not None:
            tested = self._tested_near(asked, asked.wanted, None)
            if len(tested.able):
                job, _, chosen, ttft_s = self._chosen(asked, tested)
            elif Tier.BEST_EFFORT not in query.tiers:
                decision = RouteDecision(None, UNATTAINABLE, over_share=tested.over_share)
                return Quote(decision, offer=self._offer(query, asked, tested))
        if ttft_s is None:
            chosen = self._choose(job, lambda job, _: int(self._ahead_s(job).argmin()))
        tier = Tier.GUARANTEED if ttft_s is not None else Tier.BEST_EFFORT
        predicted = self._predicted(job, chosen, second, ttft_s)
        decision = self._reserved(job, chosen, second, tier, ttft_s)
        held = Held(
            query.tenant, now_s + hold_s, query.prompt_tokens, ((query.slo.times_s, inf),),
            decision.prefill_id or decision.replica_id or "", (query.key, query.prefill_key),
        )  # fmt: skip
        holds = hold_s > 0.0 and ttft_s is not None and self.quotes.hold(query.key, held)
        if not holds:
            self._fleet.release(held.keys)
        return Quote(decision, self.quotes.times_s(predicted), predicted.tokens, None, holds)

    def _offer(self, query: RouteQuery, asked: _Asked, tested: _Tested) -> Offer | None:
        """The nearest objective that could be promised, by a few tests of what binds the replica
        that could promise it soonest: later, slower, or with an end-to-end time shorter. Beside
        the offers that are expected to be taken up meanwhile, and later by a margin."""
        if not self.returns.may_offer(query) or not self.quotes.has_room(query.tenant):
            return None
        stated, now_s, share = query.slo, asked.job.now_s, OFFER_STEP
        slo = stated
        for _ in range(MAX_OFFER_TESTS):
            farther = _farther(slo, tested.promises, share)
            if farther is None:
                return None
            slo, share = stated.with_times(farther), 1.5 * share
            tested = self._as_offered(query._replace(slo=slo), now_s) or tested
            if len(tested.able):
                break
        else:
            return None
        fewer = 0
        if stated.e2e_s is not None:
            for part in (0.25, 0.5):  # the longer one that helps
                tokens = max(1, int(part * self._lengths.of(query).bound))
                short = self._as_offered(query._replace(output_tokens=tokens), now_s)
                if short is not None and len(short.able):
                    fewer = tokens
        ttft_s, tpot_s, e2e_s = slo.times_s
        margin = self.quotes.margin
        late_s, slow = margin * VALID_S, 1.0 + OFFER_STEP * min(margin, 2.0)
        offered = (
            None if ttft_s is None else ttft_s + late_s,
            None if tpot_s is None else tpot_s * slow,
            None if e2e_s is None else e2e_s * slow + late_s,
        )
        terms = (offered, inf), (stated.times_s, fewer)
        held = Held(query.tenant, now_s + VALID_S, query.prompt_tokens, terms)
        return Offer(offered, fewer) if self.quotes.hold(query.key, held) else None

    def _as_offered(self, query: RouteQuery, now_s: float) -> _Tested | None:
        """What could be promised of a query that takes up an offer."""
        asked = self._asked(query._replace(takes=query.key, elsewhere=True), now_s)
        if isinstance(asked, RouteDecision) or asked.wanted is None:
            return None
        others = self.quotes.offered_tokens() / asked.among
        return self._tested(asked.job._replace(reserve_tokens=others), asked, asked.wanted)

    def _predicted(
        self, job: Job, chosen: int, second: DecodeChoice | None, ttft_s: float | None
    ) -> Prediction:
        """What is predicted of a request on the job's replica number ``chosen``; ``ttft_s``: of
        its first token, if that is promised."""
        figures, row, promised = self._fleet.figures, int(job.rows[chosen]), ttft_s is not None
        if ttft_s is None:
            waiting_s = figures.item(row, PREFILL_S) + figures.item(row, BEST_EFFORT_S)
            ttft_s = waiting_s + job.work_s.item(chosen) + job.lead_s.item(chosen)
            ttft_s += figures.item(row, FIXED_S) + figures.item(row, DECODE_S)
        if second is not None and job.splits[chosen]:
            row = second.row
        step_s = figures.item(row, FIXED_S) + figures.item(row, DECODE_S)
        tokens, first_s = job.output_tokens, max(ttft_s, MIN_PREDICTED_S)
        times_s = first_s, max(step_s, MIN_PREDICTED_S), first_s + max(0.0, tokens - 1.0) * step_s
        name = job.query.slo.service_class
        return Prediction(name, promised, job.waited_s, times_s, tokens)

    def _asked(
        self, query: RouteQuery, now_s: float, at: int | None = None
    ) -> _Asked | RouteDecision:
        """What to decide; a decision where no replica can be asked."""
        fleet, calibration = self._fleet, self._calibration
        if fleet.ledger.next_s <= now_s:
            fleet.expire(now_s)
        if self.quotes.ends_s <= now_s:
            fleet.release(self.quotes.ended_by(now_s))
        # The replicas that may serve it.
        rows = fleet.candidates(now_s)
        wanted: AdmissionPolicy | None = None
        if Tier.GUARANTEED in query.tiers and query.slo.stated:
            wanted = self._admission
        if query.only:
            rows = fleet.among(rows, query.only)
        if not len(rows):
            if self.cold_start is None or query.elsewhere or query.only:
                return RouteDecision(None, DECLINED if query.elsewhere else NO_REPLICA)
            tokens = self._lengths.of(query).mean
            return self.cold_start.decide(query, fleet, now_s, tokens, wanted is not None)
        if query.avoid:
            rows = fleet.but(rows, query.avoid)
        if query.moves_from:
            rows = rows[rows != fleet.row_of.get(query.moves_from, -1)]
            if query.brings_kv:  # a prefill replica cannot fetch it
                rows = rows[~fleet.are(rows, "prefill")]
            if not len(rows) or (wanted is None and not query.brings_kv):
                return RouteDecision(None, STAYS)
        elif calibration is not None:
            calibration.dropped(query.request_id or query.key)  # of an earlier decision on it
        # By when it is planned.
        stated = planned = query.slo
        if wanted is not None and calibration is not None:
            planned = calibration.plan(stated, now_s)
        if wanted is not None and planned.e2e_s is not None:
            query = self._planned(query, planned, rows)
        elif planned is not stated:
            query = query._replace(slo=planned)
        # The decode replica, if two share the request.
        second: DecodeChoice | None = None
        if fleet.has_roles:
            rows, seconds = self._by_role(query, rows)
            if seconds is not None:
                second = self._second(query, seconds, now_s, wanted)
        among = len(rows)
        if wanted is not None:
            asked_rows = self._routing.asked(rows)
            if at is not None and asked_rows is not rows:
                asked_rows = np.union1d(asked_rows, rows[rows == at])
            rows = asked_rows
        tokens = self._lengths.of(query).mean
        kv_transfer_s = None if second is None else second.kv_transfer_s
        job = job_of(fleet, query, rows, now_s, tokens, kv_transfer_s)
        # What takes up a quote or an offer came before the requests that are expected.
        if wanted is not None and not query.takes:
            overtaking_s = self.demand.recent.overtaking_s(
                now_s, job.work_s, job.due_s - now_s, job.priority
            )
            if overtaking_s > 0.0:
                job = job._replace(overtaking_s=overtaking_s / among)
        return _Asked(job, second, wanted, stated, planned, among)

    def _planned(self, query: RouteQuery, planned: SLO, rows: Ints) -> RouteQuery:
        """The query with the objective by which a promise is planned on ``rows``; an end-to-end
        time is shared out."""
        query = query._replace(slo=planned)
        if planned.e2e_s is None:
            return query
        bound = self._lengths.of(query).bound
        return query._replace(slo=shared_out(query, bound, self._fleet, rows))

    def _by_role(self, query: RouteQuery, rows: Ints) -> tuple[Ints, Ints | None]:
        """The ``rows`` where the request may start, and, if it may be split, the rows of decode
        replicas."""
        fleet = self._fleet
        of = {role: fleet.of_role(rows, role) for role in WHOLE}
        if query.prefill_key and len(of["prefill"]) and len(of["decode"]):
            return np.sort(np.concatenate((of["mixed"], of["prefill"]))), of["decode"]
        return next(own for own in of.values() if len(own)), None

    def _second(
        self, query: RouteQuery, rows: Ints, now_s: float, admission: AdmissionPolicy | None
    ) -> DecodeChoice:
        """Choose the decode replica among ``rows``."""
        fleet = self._fleet
        tokens = self._lengths.of(query).mean
        job = job_of(fleet, query, rows, now_s, tokens, moved=True)
        promises = None if admission is None else admission.promises(job, fleet)
        places = np.arange(len(rows))
        if promises is not None and promises.holds.any():
            places = np.flatnonzero(promises.holds)
        able = job.of(places)
        chosen = self._choose(able, self._routing.choose_decode)
        figures = fleet.figures[able.rows[chosen]]
        step_s = figures[FIXED_S] + figures[DECODE_S] + able.work_s[chosen]
        kv_transfer_s = fleet.transfer.seconds(query.prompt_tokens) + TRANSFER_STEPS * step_s
        return DecodeChoice(job, promises, int(places[chosen]), float(kv_transfer_s))

    def _promise(self, asked: _Asked, admission: AdmissionPolicy, at: int | None) -> RouteDecision:
        """Promise it on one of the job's replicas, if one can; on ``at`` if that can. Of many
        replicas the nearest are tested first, and the others only if none of these can."""
        second, tested = asked.second, self._tested_near(asked, admission, at)
        job, promises = tested.job, tested.promises
        if not len(tested.able):
            waits_s = self.waits_s(tested, asked.stated, admission) if self.explains else None
            decision = self._unpromised(job, promises, second, tested.over_share)
            if waits_s is not None and self.inputs is not None:
                self.inputs = self.inputs._replace(waits_s=waits_s)
            return decision
        self._record(job, promises, None, second)
        job, planned, chosen, ttft_s = self._chosen(asked, tested, at)
        placed = self._place(job, chosen, second, Tier.GUARANTEED, ttft_s)
        # It counts in its tenant's share, and its margin is known until the request has ended.
        query, tokens, now_s = job.query, job.output_tokens, job.now_s
        self.shares.promise(query, tokens, now_s)
        self.returns.promised(query, tokens, now_s)
        if self._calibration is not None:
            name = query.request_id or query.key
            if query.brings_kv:
                # Two replicas serve it, so neither is to blame for its times.
                self._calibration.dropped(name)
            else:
                # Two replicas keep a promise together, so neither is to blame for it.
                alone = placed.prefill_id is None and placed.kv_from is None
                replica_id = (placed.replica_id or "") if alone else ""
                self._calibration.promised(name, asked.stated, planned, replica_id)
        return placed

    def _chosen(
        self, asked: _Asked, tested: _Tested, at: int | None = None
    ) -> tuple[Job, SLO, int, float]:
        """Where it is promised: the job there, by when it is planned, its place in the job, and the
        predicted time to its first token, seconds."""
        places, job = tested.able, tested.job
        able = job if len(places) == len(job.rows) else job.of(places)
        chosen = int(places[self._choose(able, self._routing.choose_able, at)])
        ttft_s = float(tested.promises.ttft_s[chosen])
        if chosen in tested.apart:
            return *tested.apart[chosen], 0, ttft_s
        return job, asked.planned, chosen, ttft_s

    def _tested_near(self, asked: _Asked, admission: AdmissionPolicy, at: int | None) -> _Tested:
        """What the nearest replicas can promise, or if none of them can, what all can."""
        job = asked.job
        # A replica that is to be tried must be found among all.
        if at is None and not self._fleet.untried:
            near = self._routing.nearest(job, self._fleet)
            if near is not None:
                job = job.of(near)
        tested = self._tested(job, asked, admission)
        if not len(tested.able) and job is not asked.job:
            tested = self._tested(asked.job, asked, admission)
        return tested

    def _tested(self, job: Job, asked: _Asked, admission: AdmissionPolicy) -> _Tested:
        """What the replicas of ``job`` can promise, beside what is kept for others."""
        fleet, second = self._fleet, asked.second
        promises = admission.promises(job, fleet)
        apart = _NONE_APART
        if self._calibration is not None and self._calibration.apart:
            apart = self._set_apart(job, promises, admission, asked.stated, self._calibration)
        if second is not None:
            promises = together(job, promises, second)
        (able,) = promises.holds.nonzero()
        if not len(able) or not fleet.may_promise:
            return _Tested(job, promises, apart, _NOWHERE)
        # Each replica keeps its part of what is due.
        line_tokens = self.returns.kept_tokens(job.query, job.now_s) / asked.among
        reserve_tokens = self.shares.reserve_tokens(job.query.tenant, job.now_s)
        for tokens, over_share in ((line_tokens, False), (reserve_tokens, True)):
            if tokens > 0.0:
                promises = self._with_room_left(job, promises, second, admission, tokens)
                (able,) = promises.holds.nonzero()
                if not len(able):
                    return _Tested(job, promises, apart, able, over_share, tokens)
        return _Tested(job, promises, apart, able)

    def waits_s(
        self, tested: _Tested, stated: SLO, admission: AdmissionPolicy
    ) -> Mapping[str, float]:
        """The predicted wait for a promise at the replica that could give it soonest, seconds,
        ``as_is`` and without each term that only makes sure of promises, and without all of them. A
        wait of 0 says that this term alone refused it. Of P/D pairs, of where it starts."""
        place = int(tested.promises.wait_s.argmin())
        job = tested.job.of(np.array([place]))
        if place in tested.apart:
            job = tested.apart[place][0]
        job = job._replace(reserve_tokens=tested.reserve_tokens)
        query = self._planned(job.query, stated, job.rows)
        due = job_of(self._fleet, query, job.rows, job.now_s, job.output_tokens)
        on_time = job._replace(due_s=due.due_s, tpot_s=due.tpot_s)
        nothing = on_time._replace(overtaking_s=0.0, reserve_tokens=0.0)
        bare = admission.without_headroom()
        tests = {
            "as_is": (admission, job),
            "margin": (admission, on_time),
            "expected": (admission, job._replace(overtaking_s=0.0)),
            "reserve": (admission, job._replace(reserve_tokens=0.0)),
            "headroom": (bare, job),
            "all": (bare, nothing),
        }
        return {
            name: float(policy.promises(each, self._fleet).wait_s[0])
            for name, (policy, each) in tests.items()
        }

    def _set_apart(
        self,
        job: Job,
        promises: Promises,
        admission: AdmissionPolicy,
        stated: SLO,
        calibration: Calibration,
    ) -> dict[int, tuple[Job, SLO]]:
        """See :attr:`_Tested.apart`; what those replicas can promise by it is put into
        ``promises``. ``O(their number)``, which is small."""
        found: dict[int, tuple[Job, SLO]] = {}
        for replica_id in calibration.apart:
            (places,) = np.nonzero(job.rows == self._fleet.row_of.get(replica_id, -1))
            if not len(places) or job.splits[places[0]]:
                continue
            row = job.rows[places]
            planned = calibration.plan(stated, job.now_s, replica_id)
            query = self._planned(job.query, planned, row)
            own = job_of(self._fleet, query, row, job.now_s, self._lengths.of(query).mean)
            own = own._replace(overtaking_s=job.overtaking_s)
            able = admission.promises(own, self._fleet)
            promises.holds[places], promises.ttft_s[places] = able.holds, able.ttft_s
            promises.wait_s[places], promises.binds[places] = able.wait_s, able.binds
            found[int(places[0])] = own, planned
        return found

    def _with_room_left(
        self,
        job: Job,
        promises: Promises,
        second: DecodeChoice | None,
        admission: AdmissionPolicy,
        reserve_tokens: float,
    ) -> Promises:
        """Keep the ``promises`` that leave capacity for one more prompt of ``reserve_tokens``."""
        kept = admission.promises(job._replace(reserve_tokens=reserve_tokens), self._fleet)
        if second is not None:
            moved = second.job._replace(reserve_tokens=reserve_tokens)
            able = admission.promises(moved, self._fleet)
            kept = together(job, kept, second._replace(promises=able))
        holds = promises.holds & kept.holds
        return promises._replace(holds=holds, wait_s=kept.wait_s, binds=kept.binds)

    def _unpromised(
        self,
        job: Job,
        promises: Promises,
        second: DecodeChoice | None,
        over_share: bool = False,
    ) -> RouteDecision:
        query, wait_s = job.query, float(promises.wait_s.min())
        if query.moves_from:
            return RouteDecision(None, STAYS)
        if query.elsewhere:
            return RouteDecision(None, DECLINED)
        best_effort = Tier.BEST_EFFORT in query.tiers
        if wait_s < inf:
            # A request that can never be promised uses no tenant's share.
            self.shares.refuse(
                query, job.output_tokens, job.now_s, again=not best_effort, over_share=over_share
            )
        if best_effort:
            placed = self._best_effort(job, second, promises)
            return placed._replace(over_share=True) if over_share else placed
        self._record(job, promises, None, second)
        decision = RouteDecision(None, UNATTAINABLE, over_share=over_share)
        if wait_s == inf:
            return decision
        # Where it waits for a report only, a moment is enough.
        room_s = max(wait_s, MIN_WAIT_S)
        retry_s = self.returns.refused(query, job.output_tokens, room_s, job.now_s)
        return decision._replace(retry_after_s=retry_s, room_s=room_s)

    def _best_effort(
        self, job: Job, second: DecodeChoice | None, promises: Promises | None = None
    ) -> RouteDecision:
        ahead_s = self._ahead_s(job)
        self._record(job, promises, ahead_s, second)
        chosen = self._choose(job, lambda _job, _fleet: int(ahead_s.argmin()))
        return self._place(job, chosen, second, Tier.BEST_EFFORT)

    def _ahead_s(self, job: Job) -> Floats:
        """Predicted time of the prompts of both tiers at each replica, with this one, and until its
        first token where that is another's."""
        figures, rows = self._fleet.figures, job.rows
        waiting_s = figures[rows, PREFILL_S] + figures[rows, BEST_EFFORT_S]
        ahead_s: Floats = waiting_s + job.work_s + job.lead_s
        return ahead_s

    def _record(
        self,
        job: Job,
        promises: Promises | None,
        ahead_s: Floats | None,
        second: DecodeChoice | None,
    ) -> None:
        fleet = self._fleet
        self.inputs = DecisionInputs(
            job, fleet.ids, len(fleet.row_of), promises, ahead_s, second, fleet.untried
        )

    def _choose(self, job: Job, choose: Callable[[Job, Fleet], int], at: int | None = None) -> int:
        """A place among the job's replicas: ``at``, else a quarantined one to be tried, which might
        never be chosen otherwise, else by ``choose``. Requests that failed elsewhere or move try
        none."""
        if at is not None and at in job.rows:
            return int(np.searchsorted(job.rows, at))
        untried = self._fleet.untried
        if untried and not job.query.avoid and not job.query.moves_from:
            for place, row in enumerate(job.rows.tolist()):
                if row in untried:
                    return place
        chosen = choose(job, self._fleet)
        if not 0 <= chosen < len(job.rows):
            raise RuntimeError(
                f"policy {self._routing.name!r} chose replica {chosen} of {len(job.rows)}"
            )
        return chosen

    def _place(
        self,
        job: Job,
        chosen: int,
        second: DecodeChoice | None,
        tier: Tier | None = None,
        ttft_s: float | None = None,
    ) -> RouteDecision:
        """Send it there, and then to ``second`` where it is split, and reserve at both. If it
        teaches, note what is predicted of it."""
        query = job.query
        if not query.moves_from and self.quotes.teaches(job.now_s):
            predicted = self._predicted(job, chosen, second, ttft_s)
            self.quotes.predicted(query.request_id or query.key, predicted)
        return self._reserved(job, chosen, second, tier, ttft_s)

    def _reserved(
        self,
        job: Job,
        chosen: int,
        second: DecodeChoice | None,
        tier: Tier | None,
        ttft_s: float | None,
    ) -> RouteDecision:
        fleet, query, row = self._fleet, job.query, int(job.rows[chosen])
        made = reservation_of(job, chosen, fleet.ids, tier is not Tier.BEST_EFFORT)
        prefill_id: str | None = None
        kv_from, kv_tokens = None, 0
        if second is None or not job.splits[chosen]:
            if query.fetches_kv and second is None:
                kv_from, kv_tokens = self._kv_from(job, chosen)
            if query.prefill_key:
                # Of an earlier decision on it.
                fleet.release((query.prefill_key,))
            fleet.reserve(query.key, made)
            kv_transfer_s = float(job.lead_s[chosen])
        else:
            self._reserve_pair(job, chosen, second, made)
            prefill_id, row, kv_transfer_s = fleet.ids[row], second.row, second.kv_transfer_s
        planned, own_s = None, 0.0
        if tier is Tier.GUARANTEED:
            planned, own_s = query.slo.times_s, float(job.work_s[chosen])
        return RouteDecision(
            fleet.ids[row], PLACED, tier, ttft_s, None, fleet.roles[row], prefill_id, kv_transfer_s,
            planned=planned, own_s=own_s, kv_from=kv_from, kv_tokens=kv_tokens,
        )  # fmt: skip

    def _kv_from(self, job: Job, chosen: int) -> tuple[str | None, int]:
        """The replica that is to give the KV which counts as cached there and is not, and of how
        many tokens it is."""
        fleet, row = self._fleet, job.rows[chosen : chosen + 1]
        giver, tokens = giver_of(fleet, job.query, job.now_s)
        counted = float(job.cached_tokens[chosen])
        fetches = counted == tokens > float(cached_on(fleet, job.query, row)[0])
        return (fleet.ids[giver], int(tokens)) if fetches else (None, 0)

    def _reserve_pair(self, job: Job, chosen: int, second: DecodeChoice, made: Reservation) -> None:
        """Reserve its prefill at one replica, as ``made`` less the KV transfer, and its decode at
        another from when its prompt is due or predicted, whichever is later."""
        fleet, query = self._fleet, job.query
        due_s = job.due_s - second.kv_transfer_s
        prefill = made._replace(due_s=due_s, tpot_s=inf, output_tokens=1.0)
        fleet.reserve(query.prefill_key, prefill)
        due_in_s = job.due_s - job.now_s if job.due_s < inf else 0.0
        awaited_s = job.now_s + min(max(due_in_s, self._ahead_s(job)[chosen]), MAX_AWAITED_S)
        later = reservation_of(second.job, second.chosen, fleet.ids, made.promised)
        fleet.reserve(query.key, later._replace(awaited_s=float(awaited_s)))
