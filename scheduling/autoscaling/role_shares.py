"""How many replicas should be mixed, prefill and decode now, and which one changes next.

The load is that of autoscaling: engine time per second for prefills, and for decodes. From it
follows how busy the busiest replicas would be with any split, as in
:mod:`sluice.scheduling.autoscaling.role_shares`, of which this is the form for a measured load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, exp, inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sluice.scheduling.autoscaling.load import Load
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.rows import DECODE_SHARES, DECODES, LEAST_RATE, requests_at
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
    """Devices of each role that a rate of one request per second keeps busy.

    Attributes:
        prefill: of those that prefill, > 0.
        decode: of those that decode, > 0.
    """

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


def demand_of_tokens(
    prompt_tokens: float,
    output_tokens: float,
    tokens_per_s: float,
    tpot_s: float,
    overhead_s: float,
) -> PoolDemand:
    """The demand by the paper's model of a step, ``tokens / tokens_per_s + overhead_s``.

    Args:
        prompt_tokens, output_tokens: mean lengths of a request.
        tokens_per_s: greatest throughput of a device.
        tpot_s: the time per token that decodes must keep; infinite if none is stated.
        overhead_s: fixed time of a step.

    Raises:
        ValueError: see :func:`demand_of_work`, or a throughput that is not positive.
    """
    if not 0 < tokens_per_s < inf:
        raise ValueError(f"tokens_per_s must be positive and finite, got {tokens_per_s}")
    prefill_s, token_s = prompt_tokens / tokens_per_s, 1.0 / tokens_per_s
    return demand_of_work(prefill_s, output_tokens, token_s, tpot_s, overhead_s)


def demand_of_work(
    prefill_s: float,
    output_tokens: float,
    token_s: float,
    tpot_s: float,
    overhead_s: float,
    most_decodes: float = inf,
) -> PoolDemand:
    """The same where tokens differ in their time, as with attention over a long context.

    A step of ``tpot_s`` has ``tpot_s - overhead_s`` for its decodes. Where fewer find room, a step
    is shorter, and each token has a larger part of the overhead; the paper takes room as ample.

    Args:
        prefill_s: device time of a mean request's prompt, beyond the fixed time of steps.
        output_tokens: mean length of an output.
        token_s: device time of one output token, likewise.
        tpot_s, overhead_s: as in :func:`demand_of_tokens`.
        most_decodes: how many a device has room for, by its KV or by its places.

    Raises:
        ValueError: a number that is not positive and finite, or a step that takes ``tpot_s`` before
            any token is in it, so that no number of devices keeps the pace.
    """
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
"""Share of each second that guarantees leave unused, as admission does by default."""

MOST_SCALING = 16.0
"""Maximum factor by which the decodes of guaranteed requests are scaled up for requests without a
guarantee."""

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
    """A replica that takes requests and may change its role.

    Attributes:
        replica_id: its id.
        role: its role now.
        requests: how many it has.
        decodes: how many of its guaranteed requests decode.
        decode_shares: of each second, for the steps of those of them that state a pace.
    """

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
        asked, lost: requests with an objective each second, and those that were not guaranteed.
        prefill: engine time for prefills, seconds per second.
        decode: engine time for decodes without the fixed time of steps, seconds per second.
        decodes: how many requests decode.
        shares: of each second, for the steps of these at their pace.
        usable: share of a second that a replica has beside the fixed time of its steps while it has
            decodes.
        held: KV in use, in replicas whose whole KV it would fill.
    """

    asked: float = 0.0
    lost: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    decodes: float = 0.0
    shares: float = 0.0
    usable: float = 1.0
    held: float = 0.0


class Prompts(NamedTuple):
    """The prompts that came between two looks.

    Attributes:
        asked: how many.
        work_s: their prefill time together, seconds.
        mean_s, slack_s: prefill time of one, and the time until it is due: means weighted by the
            work, seconds.
    """

    asked: float
    work_s: float
    mean_s: float
    slack_s: float


class Means(NamedTuple):
    """What is remembered from look to look.

    Attributes:
        last: the load on all replicas then.
        need: the demand; ``None`` before any.
        backlog_s: by split, in the order of :func:`served_by`: work that would have waited.
        served: likewise, the share of the requests that would have been served in time: a mean over
            ``memory_s``. Empty before any.
        wanted: prefill replicas of the split that was wanted; ``None`` before any.
        torn: one of the two roles had no replica.
    """

    last: Load
    need: Need | None = None
    backlog_s: tuple[float, ...] = ()
    served: tuple[float, ...] = ()
    wanted: int | None = None
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
    """Changes roles to the split that would have served most of the recent demand in time.

    At each look :func:`served_by` says, of all mixed and of every split into prefill and decode
    replicas, which share of the requests since the last look it would have served in time. What
    counts is the mean of these shares over ``memory_s``. So bursts count as they were,
    and a split that loses much is left within a few looks, one that loses little only if another
    one is better for most of the time; where all requests can be served nothing changes.

    The best is wanted of all mixed and of every split into both roles: mixed replicas beside pairs
    lose to either. Of splits that serve equally much it is the one with the least busy role. The
    current one is kept unless the best serves more by ``gain``. The way there is a change at each
    look. A pair comes and goes at once, as a prefill replica without a decode one does nothing;
    mixed replicas, as new ones are, change before others, and where a role has lost its last
    replica, another one takes it. When the number of replicas changes, the mean begins again.

    Of several replicas the one with the fewest requests changes, then by id.

    Source: ours, after ProServe appendix A and SLOs-Serve appendix A, which size fixed pools.
    """

    def __init__(self, gain: float = GAIN) -> None:
        self._gain = gain

    def decide(self, load: Load, members: Sequence[Member], means: Means | None) -> Change:
        """The roles from now on. ``O(n log n + decodes)`` with ``n`` members; the same input gives
        the same decision.

        Args:
            load: the current one on the members.
            members: those that take requests, in any order.
            means: of the last decision; ``None`` at the first one.
        """
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
            # Without decodes the load says nothing of their pace.
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
    """What each split of ``n`` replicas has for a demand, ``float64[n]`` each: with all mixed, and
    with 1, 2, ... prefill replicas beside decode ones.

    Attributes:
        prefillers: replicas that prefill.
        rate: time for prefill that each of them has, seconds per second.
        slots: decodes that fit at a time.
        offered: decodes at a time if none is turned down; one number.
    """

    prefillers: Floats
    rate: Floats
    slots: Floats
    offered: float


def shares_of(need: Need, replicas: int) -> Shares:
    """What each split has.

    All steps of a prefill replica are full, so it has ``1 - h`` seconds for prefill per second,
    with ``h`` the head-room of guarantees. A decode or a mixed one has ``u - h``, with ``u`` the
    share beside the fixed time of steps at the pace of its decodes. Where the pace is tight ``u``
    is small, and prefills are cheaper apart; where it is loose, the pool of all is better, as no
    side waits for the other. A mixed replica that is without decodes at times has more. What its
    decodes take is not left for its prefills.

    Decodes take slots: each has the time of its steps at its pace, or its KV, whichever is the
    larger part of a replica. Long contexts leave a replica few slots, and the rest of one is lost.
    """
    prefillers = np.arange(replicas, dtype=np.float64)
    decoders = replicas - prefillers
    usable = max(need.usable - HEADROOM, LEAST_RATE)
    each = need.shares / need.decodes if need.decodes else 0.0
    part = max(each / usable, need.held / max(need.decodes, 1.0))
    slots = decoders * (max(1.0, 1.0 // part) if part else inf)
    # Requests that are not guaranteed do not decode in these figures.
    lost = need.lost / need.asked if need.asked else 0.0
    decode = need.decode * min(1.0 / max(1.0 - lost, 1e-9), MOST_SCALING)
    offered = decode / each if each else 0.0
    rate = np.full(replicas, 1.0 - HEADROOM)
    paced = 1.0 - exp(-offered / replicas)
    prefillers[0], rate[0] = replicas, rate[0] - paced * (1.0 - need.usable) - decode / replicas
    return Shares(prefillers, np.maximum(rate, LEAST_RATE), slots, offered)


def busy_of(need: Need, replicas: int) -> Floats:
    """Share of its time, or of its slots, for which the busier role of each split is busy."""
    prefillers, rate, slots, offered = shares_of(need, replicas)
    busy: Floats = np.maximum(need.prefill / rate / prefillers, offered / slots)
    return busy


def served_by(
    need: Need, prompts: Prompts, passed_s: float, backlog_s: Floats
) -> tuple[Floats, Floats]:
    """The share of the requests that each split of :class:`Shares` would have served in time in
    ``passed_s``, and the backlog that each would have then.

    A prompt can wait until its slack is just enough for its own prefill. Prompts that would have to
    wait longer behind the backlog are lost, and leave none. Long ones are lost first: of prompts of
    which a share ``f`` of the work is in time, ``f ** (mean / mean by work)`` are. A decode cannot
    wait: it is lost where
    all slots are taken, which is Erlang's loss formula. A request needs both roles, and one that is
    lost at one of them does not need the other, so the lesser share counts.

    Args:
        backlog_s: by split, at the last look.
    """
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
    """Erlang's loss formula: the share of arrivals that find all of ``slots`` taken,
    ``float64[n]``, where ``offered`` would be taken in the mean if there were enough.
    ``O(offered)``."""
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
