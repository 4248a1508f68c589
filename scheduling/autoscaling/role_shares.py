"""How many replicas should be mixed, prefill and decode now, and which one changes next, from the
measured load: engine time per second for prefills and for decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp, inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_SHARES, DECODES, MIN_RATE, requests_at
from sluice.scheduling.request.kernels import Floats
from sluice.scheduling.roles import ROLES, Role

# How many devices to give to prefill and how many to decode, where each does only one of them.
#
# Source: SLOs-Serve §2.3 and appendix A. It takes prefill devices as always busy at full
# throughput, and decode devices as running the largest batch that a time per token allows; so it
# is the ratio of an ideal run, in which nothing waits for chance. Bursts and a TTFT objective need
# more prefill devices than that.
#
# The ratio follows from the mean lengths and from the objective. So one ratio is right for one mix
# of requests only, which is the paper's argument against a fixed split.


class PoolDemand(NamedTuple):
    """Devices of each role that a rate of one request per second keeps busy, > 0."""

    prefill: float
    decode: float

    @property
    def ratio(self) -> float:
        """Prefill devices per decode device at which neither side waits for the other (§2.3)."""
        return self.prefill / self.decode

    @property
    def best_goodput(self) -> float:
        """Requests per second and device at that ratio (Eq. 4)."""
        return 1.0 / (self.prefill + self.decode)

    def goodput(self, prefillers: int, decoders: int) -> float:
        """Requests per second and device with this many of each, both >= 1: the scarcer side limits
        it."""
        served = min(prefillers / self.prefill, decoders / self.decode)
        return served / (prefillers + decoders)

    def least(self, rate: float) -> tuple[int, int]:
        """Whole devices of each role, at least one, that a rate of requests per second needs."""
        return max(1, ceil(rate * self.prefill)), max(1, ceil(rate * self.decode))

    def split(self, devices: int) -> tuple[int, int]:
        """``devices`` (>= 2) of both roles in the whole numbers that serve the most."""
        splits = ((devices - decoders, decoders) for decoders in range(1, devices))
        return max(splits, key=lambda split: self.goodput(*split))


def demand_of_work(
    prefill_s: float,
    output_tokens: float,
    token_s: float,
    tpot_s: float,
    overhead_s: float,
    most_decodes: float = inf,
) -> PoolDemand:
    """The demand of requests with a prefill of ``prefill_s`` and ``output_tokens`` of ``token_s``
    each, without overhead. A step of ``tpot_s`` has ``tpot_s - overhead_s`` for its decodes; where
    a device has room for only ``most_decodes``, fewer, a step is shorter and each token has more of
    the overhead (the paper assumes ample room). Raises ValueError for a number that is not
    positive and finite, and for an overhead of ``tpot_s`` or more."""
    for name, value in (
        ("prefill_s", prefill_s),
        ("output_tokens", output_tokens),
        ("token_s", token_s),
    ):
        if not 0 < value < inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if not 0 <= overhead_s < inf:
        raise ValueError(f"overhead_s must be finite and >= 0, got {overhead_s}")
    if not most_decodes > 0:
        raise ValueError(f"most_decodes must be positive, got {most_decodes}")
    if not tpot_s > overhead_s:
        raise ValueError(
            f"a time per token of {tpot_s} s cannot be kept by steps whose fixed time is "
            f"{overhead_s} s; it must be longer"
        )
    decodes = min((tpot_s - overhead_s) / token_s, most_decodes)
    return PoolDemand(prefill_s, output_tokens * (token_s + overhead_s / decodes))


HEADROOM = 0.1
"""Share of each second that promises leave unused, as admission does by default."""

MAX_SCALING = 16.0
"""Maximum factor by which the decodes of promised requests are scaled up for requests without a
promise."""

LOOK_EVERY_S = 2.5
"""How often to decide, seconds."""

GAIN = 0.05
"""Dead band: roles change only if the best split would have served this share of the requests
more."""

MEMORY_S = 15.0
"""Averaging time of what the splits would have served, seconds."""

SMOOTHING_S = 5.0
"""Averaging time of the demand of decodes, seconds."""

_NO_CHANGES: Mapping[str, Role] = MappingProxyType({})


class Member(NamedTuple):
    """A replica that takes requests and may change its role. ``decodes`` are its promised requests
    that decode; ``decode_shares``, of each second, are for those with a TPOT."""

    replica_id: str
    role: Role
    requests: float
    decodes: float
    decode_shares: float


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


class Need(NamedTuple):
    """Demand of all replicas together: means over the averaging time.

    Attributes:
        asked, lost: requests with an objective each second, and those that were not promised.
        prefill, decode: engine time, seconds per second, without the fixed time of decode steps.
        shares: of each second, for the steps of the ``decodes`` at their TPOT.
        usable: share of a second beside the fixed time of its steps while a replica has decodes.
        held: KV in use, in replicas whose whole KV it would fill."""

    asked: float = 0.0
    lost: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    decodes: float = 0.0
    shares: float = 0.0
    usable: float = 1.0
    held: float = 0.0


class Prompts(NamedTuple):
    """The prompts that came between two looks. ``work_s`` is their prefill time together;
    ``mean_s`` and ``slack_s`` are the time of one and the time until it is due, weighted by the
    work, seconds."""

    asked: float
    work_s: float
    mean_s: float
    slack_s: float


class Means(NamedTuple):
    """What is remembered from look to look.

    Attributes:
        last: the load on all replicas then.
        need: the demand; ``None`` before any.
        backlog_s, served: by split, in the order of ``served_by``: work that would have waited, and
            the share that would have been served in time, a mean over ``memory_s``.
        wanted: prefill replicas of the split that was wanted; ``None`` before any.
        torn: one of the two roles had no replica."""

    last: Load
    need: Need | None = None
    backlog_s: tuple[float, ...] = ()
    served: tuple[float, ...] = ()
    wanted: int | None = None
    torn: bool = False


class Change(NamedTuple):
    """The new role of each replica that changes: none, one, or two where a P/D pair comes or the
    last one goes; with the memory for the next decision and the reason with its figures."""

    roles: Mapping[str, Role]
    means: Means
    reason: str = ""


class RoleShares:
    """Changes roles to the split that would have served most of the recent demand in time.

    At each look ``served_by`` gives, for all mixed and for every split into prefill and decode
    replicas, the share of requests served in time; its mean over ``memory_s`` counts. Mixed
    replicas beside pairs lose to either. Equal splits: the one with the least busy role. The
    current one is kept unless the best serves more by ``gain``. Each look makes one change, of the
    replica with the fewest requests, mixed ones first; a pair comes and goes at once. A change in
    the number of replicas restarts the mean.

    Source: ours, after ProServe appendix A and SLOs-Serve appendix A, which size fixed pools."""

    def __init__(self, gain: float = GAIN) -> None:
        self._gain = gain

    def decide(self, load: Load, members: Sequence[Member], means: Means | None) -> Change:
        """The roles from now on. ``O(n log n + decodes)`` with ``n`` members, deterministic.
        ``means`` is that of the last decision; ``None`` at first."""
        if means is None or not load.follows(means.last):
            return Change(_NO_CHANGES, Means(load))
        split = split_of(members)
        torn = bool(split.prefill) != bool(split.decode)
        # A replica may be late with its reports only, so it is looked at twice.
        late = torn and not means.torn
        means = self._measured(load, members, means, torn)._replace(torn=torn)
        if split.replicas < 2 or late or not means.served:
            return Change(_NO_CHANGES, means)
        best, reason = self._best(means, split)
        wanted = Split(0, best, split.replicas - best) if best else Split(split.replicas, 0, 0)
        roles, means = dict(_towards(members, split, wanted)), means._replace(wanted=best)
        return Change(roles, means, reason) if roles else Change(_NO_CHANGES, means)

    def _measured(self, load: Load, members: Sequence[Member], means: Means, torn: bool) -> Means:
        """The means, updated by what came since the last look. A role without replicas gets one
        also where no request has come."""
        last, passed_s = means.last, load.now_s - means.last.now_s
        asked = (load.asked - last.asked) / passed_s
        work_s = load.asked_s - last.asked_s
        decodes = sum(member.decodes for member in members)
        shares = sum(member.decode_shares for member in members)
        before = means.need or Need()
        now = Need(
            asked,
            (load.unpromised - last.unpromised) / passed_s,
            work_s / passed_s,
            load.decode_share,
            decodes,
            shares,
            # Without decodes the load says nothing of their TPOT.
            load.capacity if shares else before.usable,
            load.kv_share * load.ready,
        )
        if means.need is not None:
            part = 1.0 - exp(-passed_s / SMOOTHING_S)
            now = Need(*(was + part * (one - was) for was, one in zip(before, now, strict=True)))
        weighted = (load.asked_s2 - last.asked_s2, load.slack_s2 - last.slack_s2)
        means_s = (each / work_s if work_s > 0 else 0.0 for each in weighted)
        prompts = Prompts(load.asked - last.asked, work_s, *means_s)
        if len(means.backlog_s) != len(members):
            means = means._replace(backlog_s=(0.0,) * len(members), served=(), wanted=None)
        served, backlog_s = served_by(now, prompts, passed_s, np.array(means.backlog_s))
        if means.served:
            part = 1.0 - exp(-passed_s / MEMORY_S) if prompts.asked else 0.0
            served = means.served + part * (served - means.served)
        return means._replace(
            last=load,
            need=now,
            backlog_s=tuple(backlog_s.tolist()),
            served=tuple(served.tolist()) if means.served or prompts.asked or torn else (),
        )

    def _best(self, means: Means, split: Split) -> tuple[int, str]:
        """Prefill replicas of the split to go to, and why: of the one that is or was wanted where
        no other serves more by enough."""
        need, kept = means.need, means.wanted
        assert need is not None
        if kept is None and split.settled:
            kept = split.prefill
        served = np.array(means.served)
        busy = busy_of(need, split.replicas)
        best = min(
            range(split.replicas),
            key=lambda each: (
                -np.round(float(served[each]), 3),
                busy[each],
                abs(each - split.prefill),
            ),
        )
        words = (
            f"prefill takes {need.prefill:.2f} and decode {need.decode:.2f} of a replica, with "
            f"{need.usable:.0%} of its time usable: "
        )
        if kept is None:
            return best, f"{words}{served[best]:.0%} served in time"
        words += f"{served[best]:.0%} served in time with {_named(best, split.replicas)}"
        if served[best] - served[kept] <= self._gain:
            return kept, words
        return best, f"{words}, {served[kept]:.0%} with {_named(kept, split.replicas)}"


class Shares(NamedTuple):
    """What each split of ``n`` replicas has for a demand, ``float64[n]`` each: all mixed, then 1,
    2, ... prefill replicas beside decode ones.

    ``rate`` is the prefill time of each of the ``prefillers``, seconds per second; ``slots`` is the
    decodes that fit at a time; ``offered`` the decodes at a time if none is refused."""

    prefillers: Floats
    rate: Floats
    slots: Floats
    offered: float


def shares_of(need: Need, replicas: int) -> Shares:
    """What each split has.

    A prefill replica has ``1 - h`` seconds for prefill per second, with ``h`` the head-room of
    promises; a decode or mixed one ``u - h``, with ``u`` the share beside the fixed time of steps
    at the TPOT of its decodes. So prefills are cheaper apart where the TPOT is tight; where it is
    loose, all mixed is better, as no side waits for the other. Each decode takes a slot: the time
    of its steps or its KV, whichever is the larger part of a replica."""
    prefillers = np.arange(replicas, dtype=np.float64)
    decoders = replicas - prefillers
    usable = max(need.usable - HEADROOM, MIN_RATE)
    each = need.shares / need.decodes if need.decodes else 0.0
    part = max(each / usable, need.held / max(need.decodes, 1.0))
    slots = decoders * (max(1.0, 1.0 // part) if part else inf)
    # Requests that are not guaranteed do not decode in these figures.
    lost = need.lost / need.asked if need.asked else 0.0
    decode = need.decode * min(1.0 / max(1.0 - lost, 1e-9), MAX_SCALING)
    offered = decode / each if each else 0.0
    rate = np.full(replicas, 1.0 - HEADROOM)
    paced = 1.0 - exp(-offered / replicas)
    prefillers[0], rate[0] = replicas, rate[0] - paced * (1.0 - need.usable) - decode / replicas
    return Shares(prefillers, np.maximum(rate, MIN_RATE), slots, offered)


def busy_of(need: Need, replicas: int) -> Floats:
    """Share of its time, or of its slots, for which the busier role of each split is busy."""
    prefillers, rate, slots, offered = shares_of(need, replicas)
    busy: Floats = np.maximum(need.prefill / rate / prefillers, offered / slots)
    return busy


def served_by(
    need: Need, prompts: Prompts, passed_s: float, backlog_s: Floats
) -> tuple[Floats, Floats]:
    """The share of the requests that each split would have served in time in ``passed_s``, and the
    backlog then.

    Prompts that would wait longer than their slack allows are lost and leave no backlog, long ones
    first: where a share ``f`` of the work is in time, ``f ** (mean / mean by work)`` of them are. A
    decode is lost where all slots are taken (Erlang's loss formula). The lesser of both shares
    counts, as a request lost at one role does not need the other."""
    prefillers, rate, slots, offered = shares_of(need, len(backlog_s))
    left_s = np.maximum(0.0, backlog_s + prompts.work_s - prefillers * rate * passed_s)
    most_s = prefillers * np.maximum(0.0, rate * prompts.slack_s - prompts.mean_s)
    lost_s = np.clip(left_s - most_s, 0.0, prompts.work_s)
    in_time = np.ones(len(left_s))
    if prompts.mean_s > 0:
        likeness = prompts.work_s / prompts.asked / prompts.mean_s
        in_time = (1.0 - lost_s / prompts.work_s) ** likeness
    return np.minimum(in_time, 1.0 - blocked(offered, slots)), left_s - lost_s


def blocked(offered: float, slots: Floats) -> Floats:
    """Erlang's loss formula: the share of arrivals that find all ``slots`` taken, ``float64[n]``,
    at ``offered`` load. ``O(offered)``."""
    most = int(min(slots.max(), 2.0 * offered + 100.0))
    found = [1.0]
    for count in range(1, most + 1):
        found.append(offered * found[-1] / (count + offered * found[-1]))
    share: Floats = np.array(found)[np.minimum(slots, most).astype(np.int64)]
    return share


def members_of(fleet: Fleet, now_s: float) -> list[Member]:
    """The replicas of a fleet that take requests. ``O(replicas)``."""
    rows = fleet.present(now_s)
    figures = fleet.figures[rows]
    requests, decodes = requests_at(figures).tolist(), figures[:, DECODES].tolist()
    shares = figures[:, DECODE_SHARES].tolist()
    ids, roles = [fleet.ids[row] for row in rows], [fleet.roles[row] for row in rows]
    return list(map(Member, ids, roles, requests, decodes, shares))


def split_of(members: Sequence[Member]) -> Split:
    """Their numbers by role."""
    roles = [member.role for member in members]
    return Split(*(roles.count(role) for role in ROLES))


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


def _named(prefillers: int, replicas: int) -> str:
    if not prefillers:
        return "all mixed"
    return f"{prefillers} prefill and {replicas - prefillers} decode"
