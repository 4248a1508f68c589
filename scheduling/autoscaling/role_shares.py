"""How many replicas should be mixed, prefill and decode now, and which one changes next.

The load is that of autoscaling: engine time per second for prefills, and for decodes. From it
follows how busy the busiest replicas would be with any split, as in
:mod:`sluice.scheduling.fleet.pool_ratio`, of which this is the form for a measured load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf
from types import MappingProxyType
from typing import NamedTuple

from pydantic import Field

from sluice.scheduling.autoscaling.load import Demand, Load
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODES, requests_at
from sluice.scheduling.policy import PolicyOptions
from sluice.scheduling.roles import ROLES, Role

SLOWER = 4.0
"""Ratio of the two averaging times of demand; the difference of the means is the trend."""

MOST_GROWTH = 2.0
"""Maximum ratio of a forecast to the current mean."""

MOST_SCALING = 4.0
"""Maximum factor by which the decodes of guaranteed requests are scaled up for requests without a
guarantee."""

PREFILL_LOAD = 0.7
"""Share of its time for which a prefill replica counts as full: prompts that come together wait for
each other."""

LOST = 0.05
"""A role that cannot guarantee more than this share of what it is asked for is full, however busy
it should be."""

MOST_STRAIN = 2.0
"""Maximum factor that a role is learned to be busier by than it should be. A role that should be
less busy than its inverse teaches nothing: what it lost it lost earlier."""

UNLEARN_S = 300.0
"""Time in which such a factor loses ``1 - 1/e`` of its effect, seconds."""

LOOK_EVERY_S = 2.5
"""How often to decide, seconds."""

_NO_CHANGES: Mapping[str, Role] = MappingProxyType({})


class RoleSharesOptions(PolicyOptions):
    """When replicas change their roles."""

    gain: float = Field(
        default=0.15,
        ge=0.01,
        lt=1,
        description="Dead band: a role changes only if the busiest replicas would be this share "
        "less busy with the best split.",
    )
    least_load: float = Field(
        default=0.3,
        ge=0,
        lt=1,
        description="No role changes while the busiest replicas are less busy than this.",
    )
    hold_s: float = Field(
        default=60.0,
        ge=1,
        le=86_400,
        description="Minimum time from the last change until another split is looked for, seconds.",
    )
    smoothing_s: float = Field(
        default=30.0, gt=0, le=3600, description="Averaging time of the demand, seconds."
    )
    ahead_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How far ahead demand is forecast, seconds: at least the time of a long "
        "answer, as a change has its full effect when the decodes of the replica have ended.",
    )


class Member(NamedTuple):
    """A replica that takes requests and may change its role.

    Attributes:
        replica_id: its id.
        role: its role now.
        requests: how many it has.
        decodes: how many of its guaranteed requests decode.
    """

    replica_id: str
    role: Role
    requests: float
    decodes: float


class Split(NamedTuple):
    """Replicas by role, in the order of :data:`ROLES`."""

    mixed: int
    prefill: int
    decode: int

    @property
    def replicas(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def settled(self) -> bool:
        """Whether all are mixed, or none is and both roles have replicas."""
        return not (self.mixed and (self.prefill or self.decode)) and (
            bool(self.prefill) == bool(self.decode)
        )


class Loads(NamedTuple):
    """The load on all replicas together, and on those of each role."""

    all: Load
    mixed: Load
    prefill: Load
    decode: Load


class Need(NamedTuple):
    """Demand of all replicas together.

    Attributes:
        prefill: engine time for prefills, seconds per second.
        decode: engine time for decodes without the fixed time of steps, seconds per second.
        usable: share of a second that a replica has beside that fixed time while it has decodes, >
            0.
        held: KV in use, in replicas whose whole KV it would fill.
        decodes: how many requests decode while prefills come.
    """

    prefill: float
    decode: float
    usable: float
    held: float = 0.0
    decodes: float = inf


class Asked(NamedTuple):
    """Work that was asked of a role or of all, and that was not guaranteed: mean rates."""

    asked_s: float = 0.0
    unpromised_s: float = 0.0

    @property
    def lost(self) -> float:
        """Share that was not guaranteed."""
        return self.unpromised_s / self.asked_s if self.asked_s > 0 else 0.0


class Means(NamedTuple):
    """What is remembered from look to look.

    Attributes:
        last: the loads then, on all replicas and on each role.
        fast, slow: means of the demand with the two averaging times; ``None`` before any. Usable
            times are weighted by the decodes in them, and decodes by the prefills.
        asked: of all, and of each role.
        strain: by role, how much busier it is than it should be.
        changed_s: when a role changed last.
        torn: one of the two roles had no replica.
    """

    last: Loads
    fast: Need | None = None
    slow: Need | None = None
    asked: tuple[Asked, ...] = (Asked(),) * 4
    strain: tuple[float, ...] = (1.0,) * 3
    changed_s: float = -inf
    torn: bool = False


class Change(NamedTuple):
    """Roles from now on.

    Attributes:
        roles: the new role of each replica that changes: of one, or of two that become a P/D pair
            or cease to be the last one. Empty: nothing changes.
        means: to be passed to the next decision.
        reason: why, in a few words, with the figures that decided.
    """

    roles: Mapping[str, Role]
    means: Means
    reason: str = ""


class RoleShares:
    """Changes roles so that the busiest replicas are as little busy as possible.

    With ``p`` and ``d`` the demand of prefills and decodes and ``u`` the usable share of a replica
    that decodes: a prefill replica gives ``l``, :data:`PREFILL_LOAD`, seconds of prefill per
    second, as all its steps are full, a decode or a mixed one ``u`` seconds of either. So ``n``
    mixed replicas are busy for ``(p + d) / u / n`` of their time, and of ``P`` prefill and ``D``
    decode ones the busier side for ``max(p / l / P, d / u / D)``. Where the pace is tight ``u`` is
    small, and prefills are cheaper apart; where it is loose, the pool of all is better, as no side
    waits for the other. Where so few requests decode that replicas are without decodes at times,
    ``u`` is nearer to 1. If the KV in use needs more replicas than the decodes' time does, it
    counts instead.

    Bursts need more than the mean. So a role that cannot guarantee a share of what it is asked for
    counts as full, and from then on as busier than the formula says by the same factor, until it
    is less busy with it than it proves to be able to, or for some minutes.

    The best is wanted of all mixed and of every split into both roles: mixed replicas beside pairs
    lose to either. The current one is kept unless the best is better by ``gain``, and for
    ``hold_s`` after a change. The way there is a change at each look. A pair comes and goes at
    once, as a prefill replica without a decode one does nothing; mixed replicas, as new ones are,
    change before others, and where a role has lost its last replica, another one takes it.

    Under a constant demand of which nothing is lost every change comes nearer to the same best
    split, so there are at most as many changes as replicas. Of several replicas the one with the
    fewest requests changes, then by id.

    Source: ours, after ProServe appendix A and SLOs-Serve appendix A, which size fixed pools.
    """

    def __init__(self, options: RoleSharesOptions | None = None) -> None:
        self.options = options or RoleSharesOptions()

    def decide(self, loads: Loads, members: Sequence[Member], means: Means | None) -> Change:
        """The roles from now on. ``O(n log n)`` with ``n`` members; the same input gives the same
        decision.

        Args:
            loads: the current ones on the members.
            members: those that take requests, in any order.
            means: of the last decision; ``None`` at the first one.
        """
        now_s = loads.all.now_s
        if means is None or not loads.all.follows(means.last.all):
            return Change(_NO_CHANGES, Means(loads, changed_s=now_s))
        decodes = sum(member.decodes for member in members)
        means, before = self._measured(loads, decodes, means), means
        split = split_of(members)
        torn = bool(split.prefill) != bool(split.decode)
        # A replica may be late with its reports only, so it is looked at twice.
        means, torn = means._replace(torn=torn), torn and before.torn
        held = now_s - means.changed_s < self.options.hold_s
        if split.replicas < 2 or (split.settled and held) or (means.torn and not torn):
            return Change(_NO_CHANGES, means)
        if split.settled:
            means = self._learnt(means, split)
        wanted, reason = self._wanted(self._forecast(means), split, means.strain)
        roles = dict(_towards(members, split, wanted))
        if not roles:
            return Change(_NO_CHANGES, means)
        return Change(roles, means._replace(changed_s=now_s), reason)

    def _measured(self, loads: Loads, decodes: float, before: Means) -> Means:
        """The means, updated by the loads since the last look and the ``decodes`` now."""
        load, last = loads.all, before.last.all
        passed_s = load.now_s - last.now_s
        fast = 1.0 - exp(-passed_s / self.options.smoothing_s)
        slow = 1.0 - exp(-passed_s / (SLOWER * self.options.smoothing_s))
        unlearn = 1.0 - exp(-passed_s / UNLEARN_S)
        asked = tuple(
            Asked(
                mean.asked_s + fast * ((now.asked_s - then.asked_s) / passed_s - mean.asked_s),
                mean.unpromised_s
                + fast * ((now.unpromised_s - then.unpromised_s) / passed_s - mean.unpromised_s),
            )
            for mean, now, then in zip(before.asked, loads, before.last, strict=True)
        )
        scaling = min(1.0 / max(1.0 - asked[0].lost, 1e-9), MOST_SCALING)
        prefill, decode = (load.asked_s - last.asked_s) / passed_s, load.decode_share * scaling
        # Without decodes the load says nothing of their pace. Prompts come together, and so do
        # their decodes.
        weighted = decode * load.capacity, decodes * scaling * prefill
        need = Need(prefill, decode, weighted[0], load.kv_share * load.ready, weighted[1])
        return before._replace(
            last=loads,
            fast=_mean(before.fast, need, fast),
            slow=_mean(before.slow, need, slow),
            asked=asked,
            strain=tuple(each + unlearn * (1.0 - each) for each in before.strain),
        )

    def _forecast(self, means: Means, ahead_s: float | None = None) -> Need:
        """The demand ``ahead_s`` from now; default: as long as the options say."""
        fast, slow, options = means.fast, means.slow, self.options
        assert fast is not None and slow is not None
        ahead_s = options.ahead_s + options.smoothing_s if ahead_s is None else ahead_s
        ahead = ahead_s / ((SLOWER - 1.0) * options.smoothing_s)

        def then(now: float, earlier: float) -> float:
            return min(max(0.0, now + (now - earlier) * ahead), MOST_GROWTH * now)

        return Need(
            then(fast.prefill, slow.prefill),
            then(fast.decode, slow.decode),
            fast.usable / fast.decode if fast.decode > 0 else 1.0,
            fast.held,
            fast.decodes / fast.prefill if fast.prefill > 0 else 0.0,
        )

    def _learnt(self, means: Means, split: Split) -> Means:
        """What the share that the roles could not guarantee teaches: they are full, and how busy
        they should be was wrong by that much."""
        should = busy_of(self._forecast(means, 0.0), split)
        strain = list(means.strain)
        for place, role in enumerate(ROLES):
            lost, busy = means.asked[1 + place].lost, should.get(role, 0.0)
            if busy * MOST_STRAIN <= 1.0:
                continue
            if lost > LOST:
                strain[place] = max(strain[place], min((1.0 + lost) / busy, MOST_STRAIN))
            else:
                strain[place] = min(strain[place], max(1.0, 1.0 / busy))
        return means._replace(strain=tuple(strain))

    def _wanted(self, need: Need, split: Split, strain: Sequence[float]) -> tuple[Split, str]:
        """The split to go to, and why: the current one where no other is better by enough."""
        kept, replicas = 1.0 - self.options.gain, split.replicas

        def busy(split: Split) -> float:
            should = busy_of(need, split)
            return max(should[role] * strain[ROLES.index(role)] for role in should)

        mixed = Split(replicas, 0, 0)
        apart = min(
            (Split(0, prefill, replicas - prefill) for prefill in range(1, replicas)),
            key=lambda each: (busy(each), _distance(split, each), each),
        )
        if split == mixed:
            best = apart if busy(apart) < kept * busy(mixed) else mixed
        else:
            best = mixed if busy(mixed) < kept * busy(apart) else apart
        words = (
            f"prefill takes {need.prefill:.2f} and decode {need.decode:.2f} of a replica, with "
            f"{need.usable:.0%} of its time usable: the busiest is {busy(best):.0%} busy with "
            f"{_named(best)}"
        )
        if split.settled:
            now = busy(split)
            if now < self.options.least_load or busy(best) >= kept * now:
                return split, ""
            words += f", {now:.0%} before"
        return best, words


def busy_of(need: Need, split: Split) -> dict[Role, float]:
    """Share of its time for which each role of a settled split should be busy; 1 and above is
    overload. ``O(1)``."""
    mixed, prefill, decode = split
    # A replica without decodes has no pace to keep. Where they are few, chance decides which have.
    paced = 1.0 - exp(-need.decodes / (mixed or decode))
    usable = 1.0 - paced * (1.0 - need.usable)
    decode_s = max(need.decode / usable, need.held)
    if mixed:
        return {"mixed": (need.prefill / usable + decode_s) / mixed}
    return {"prefill": need.prefill / PREFILL_LOAD / prefill, "decode": decode_s / decode}


def loads_of(demand: Demand, fleet: Fleet, now_s: float) -> Loads:
    """The loads on a fleet. ``O(replicas)``."""
    return Loads(*(demand.load(fleet, now_s, role=role) for role in (None, *ROLES)))


def members_of(fleet: Fleet, now_s: float) -> list[Member]:
    """The replicas of a fleet that take requests. ``O(replicas)``."""
    rows = fleet.present(now_s)
    figures = fleet.figures[rows]
    requests, decodes = requests_at(figures).tolist(), figures[:, DECODES].tolist()
    ids, roles = [fleet.ids[row] for row in rows], [fleet.roles[row] for row in rows]
    return list(map(Member, ids, roles, requests, decodes))


def split_of(members: Sequence[Member]) -> Split:
    """Their numbers by role."""
    roles = [member.role for member in members]
    return Split(*(roles.count(role) for role in ROLES))


def _distance(one: Split, other: Split) -> int:
    """Replicas that change between two splits."""
    return sum(abs(here - there) for here, there in zip(one, other, strict=True)) // 2


def _towards(members: Sequence[Member], split: Split, wanted: Split) -> Iterator[tuple[str, Role]]:
    """The next change on the way to ``wanted``: replicas and their new roles."""
    lacks = {role: there - here for role, here, there in zip(ROLES, split, wanted, strict=True)}
    if not any(lacks.values()):
        return
    if not wanted.prefill and split.prefill <= 1 and split.decode <= 1:
        changes: list[tuple[Role, Role]] = [("prefill", "mixed"), ("decode", "mixed")]
    elif not split.prefill and not split.decode:
        changes = [("mixed", "prefill"), ("mixed", "decode")]
    else:
        # To a role that has none, else to the one that lacks most; mixed replicas change first.
        empty = {role: not has and lacks[role] > 0 for role, has in zip(ROLES, split, strict=True)}
        to = max(ROLES, key=lambda role: (empty[role], lacks[role]))
        source = max(
            (role for role in ROLES if lacks[role] < 0),
            key=lambda role: (role == "mixed", -lacks[role]),
        )
        changes = [(source, to)]
    left = sorted(members, key=lambda member: (member.requests, member.replica_id))
    for source, to in changes:
        chosen = next((member for member in left if member.role == source), None)
        if chosen is not None:
            left.remove(chosen)
            yield chosen.replica_id, to


def _mean(before: Need | None, now: Need, part: float) -> Need:
    if before is None:
        return now
    return Need(*(was + part * (one - was) for was, one in zip(before, now, strict=True)))


def _named(split: Split) -> str:
    if split.mixed:
        return "all mixed"
    return f"{split.prefill} prefill and {split.decode} decode"
