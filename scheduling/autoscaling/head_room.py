"""As many replicas as the SLOs need, with head-room for the demand until a new one is ready."""

from __future__ import annotations

from math import ceil, exp
from typing import NamedTuple

from pydantic import Field

from sluice.scheduling.autoscaling.base import STARTUP_S, AutoscalingPolicy, Decision, Pool, State
from sluice.scheduling.autoscaling.load import MAX_SCALING, Load
from sluice.scheduling.policy import PolicyOptions

MIN_LIMIT = 0.3
"""Lower bound of the learned load limit of a replica."""

KV_LOAD = 0.85
"""Share of the KV blocks that may be in use."""

BEST_EFFORT_WITHIN_S = 60.0
"""Time within which waiting best-effort prefills should be done, seconds."""

DOWN_MARGIN = 0.15
"""A replica is removed only if the others would stay this share below their limits."""


class HeadRoomOptions(PolicyOptions):
    """How much head-room is kept, and how fast a pool may change."""

    startup_s: float = Field(
        default=STARTUP_S,
        gt=0,
        le=3600,
        description="Time until a new replica serves, seconds: demand is forecast this far ahead.",
    )
    smoothing_s: float = Field(
        default=15.0,
        gt=0,
        le=600,
        description="Averaging time of the demand, seconds: shorter follows bursts.",
    )
    target_load: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of a replica's time that SLOs may take. If SLOs are lost at a lower "
        "load, the policy learns to keep more head-room.",
    )
    attainment: float = Field(
        default=0.99,
        gt=0,
        lt=1,
        description="Target share of the requests with an objective that are guaranteed and meet "
        "it; below it, a replica is added.",
    )
    down_after_s: float = Field(
        default=180.0,
        ge=0,
        description="Time for which fewer replicas must suffice without a break before one is "
        "removed, seconds; it restarts after each removal.",
    )


class _Memory(NamedTuple):
    """State between decisions; see ``HeadRoom`` for the terms.

    Attributes:
        demand_s, slow_s: means of the demand with the two time constants; negative before any.
        asked_s, unpromised_s, asked, lost: rates, of work or of requests.
        pressure: mean of the share of the admission budget that is taken.
        limit: learned maximum load of a replica at which it meets its SLOs.
        trial: share that was lost when a replica was added as a trial, at ``trial_load``; 0: no
            trial.
        borne: learned share that is lost whatever is added.
        low_since_s: since when fewer replicas, at most ``low_most``, have sufficed; negative: they
            do not."""

    last: tuple[float, ...]
    demand_s: float
    slow_s: float
    asked_s: float
    unpromised_s: float
    asked: float
    lost: float
    pressure: float
    limit: float
    trial: float
    trial_load: float
    borne: float
    grown_s: float
    low_since_s: float
    low_most: int


class HeadRoom(AutoscalingPolicy):
    """Meets SLOs with as few replicas as possible.

    Demand is engine time per second: the prefill work of all requests that ask for a promise plus
    the time of decodes, scaled up by the share that could not be promised. Extrapolated to when a
    new replica would serve, it must keep each replica busy for at most ``limit`` of its time:
    ``target_load``, or a learned lower value. In addition:

    - a pool without admission budget left grows until it has some;
    - the KV in use must be within ``KV_LOAD``, and waiting best-effort prefills must be done within
      ``BEST_EFFORT_WITHIN_S``;
    - if more SLOs are lost than ``attainment`` allows nevertheless, one replica is added as a
      trial. If it helps, ``limit`` is lowered below that load; if not, the loss has another reason.

    A pool grows at once, and shrinks to the most needed within ``down_after_s``, one at
    a time, with ``DOWN_MARGIN``."""

    name = "head_room"
    source = "ours"
    Options = HeadRoomOptions
    options: HeadRoomOptions

    @property
    def startup_s(self) -> float:
        """See :attr:`AutoscalingPolicy.startup_s`."""
        return self.options.startup_s

    @property
    def _slow_s(self) -> float:
        """Time constant of the slower means: their difference to the faster ones is the trend."""
        return 4.0 * self.options.smoothing_s

    def decide(self, load: Load, pool: Pool, state: State) -> Decision:
        """See :meth:`AutoscalingPolicy.decide`. ``O(1)``."""
        before = self._memory(load, state)
        if before is None:
            return Decision(pool.bounded(pool.target), self._first(load, state), "first look")
        if load.ready < 1:
            return Decision(pool.bounded(pool.target), before._asdict(), "no replica is heard of")
        memory = self._measured(load, before)
        up, down, reason = self._needed(load, pool, memory)
        memory, lost = self._learnt(load, pool, memory, up)
        if lost:
            up, down, reason = max(up, pool.target + 1), pool.target, lost
        if up > pool.target:
            target = pool.bounded(min(up, pool.target + 8))
            grown_s = load.now_s if target > pool.target else memory.grown_s
            memory = memory._replace(grown_s=grown_s, low_since_s=-1.0, low_most=0)
        else:
            target, memory = self._lowered(load, pool, memory, down)
        return Decision(target, memory._asdict(), reason)

    # What is remembered.

    def _memory(self, load: Load, state: State) -> _Memory | None:
        """The state; ``None`` if there is none of this version, or the controller has restarted."""
        if not state.keys() >= set(_Memory._fields):
            return None
        memory = _Memory(**{name: state[name] for name in _Memory._fields})
        return memory if load.follows(Load(*memory.last)) else None

    def _first(self, load: Load, state: State) -> State:
        """The initial state; it keeps what was learned about the replicas before a restart of the
        controller."""
        return _Memory(
            last=tuple(load),
            demand_s=-1.0,
            slow_s=-1.0,
            asked_s=0.0,
            unpromised_s=0.0,
            asked=0.0,
            lost=0.0,
            pressure=1.0 - load.head_room,
            limit=state.get("limit", self.options.target_load),
            trial=0.0,
            trial_load=0.0,
            borne=state.get("borne", 0.0),
            grown_s=-1.0,
            low_since_s=-1.0,
            low_most=0,
        )._asdict()

    def _measured(self, load: Load, before: _Memory) -> _Memory:
        """The means, updated by the load since the last sample."""
        last = Load(*before.last)
        passed_s = load.now_s - last.now_s
        fast = 1.0 - exp(-passed_s / self.options.smoothing_s)
        slow = 1.0 - exp(-passed_s / self._slow_s)
        unlearn = 1.0 - exp(-passed_s / 3600.0)

        def rate(mean: float, now: float, then: float) -> float:
            return mean + slow * ((now - then) / passed_s - mean)

        asked_s = rate(before.asked_s, load.asked_s, last.asked_s)
        unpromised_s = rate(before.unpromised_s, load.unpromised_s, last.unpromised_s)
        promised_s = max(asked_s - unpromised_s, asked_s / MAX_SCALING)
        scaling = asked_s / promised_s if promised_s > 0 else 1.0
        prefill_s = (load.asked_s - last.asked_s) / passed_s
        demand_s = (prefill_s + load.decode_share * scaling) / load.capacity
        known = before.demand_s >= 0
        return before._replace(
            last=tuple(load),
            demand_s=before.demand_s + fast * (demand_s - before.demand_s) if known else demand_s,
            slow_s=before.slow_s + slow * (demand_s - before.slow_s) if known else demand_s,
            asked_s=asked_s,
            unpromised_s=unpromised_s,
            asked=rate(before.asked, load.asked, last.asked),
            lost=rate(before.lost, load.lost, last.lost),
            pressure=before.pressure + fast * (1.0 - load.head_room - before.pressure),
            limit=before.limit + unlearn * (self.options.target_load - before.limit),
            borne=before.borne - unlearn * before.borne,
        )

    # What is needed.

    def _needed(self, load: Load, pool: Pool, memory: _Memory) -> tuple[int, int, str]:
        """Replicas below which the pool grows, and above which it may shrink, and why."""
        options = self.options
        trend = (memory.demand_s - memory.slow_s) / (self._slow_s - options.smoothing_s)
        ahead_s = trend * (options.startup_s + options.smoothing_s)
        forecast = min(memory.demand_s + max(0.0, ahead_s), 2.0 * memory.demand_s)
        best_effort = load.best_effort_s / BEST_EFFORT_WITHIN_S
        wants = {
            f"demand {forecast:.2f} at {memory.limit:.2f} each": forecast / memory.limit,
            f"admission budget {memory.pressure:.0%} taken": (
                load.ready * memory.pressure if memory.pressure > 1.0 else 0.0
            ),
            f"KV {load.kv_share:.0%} in use": load.ready * load.kv_share / KV_LOAD,
            f"best effort {best_effort:.2f} beside": memory.demand_s + best_effort,
        }
        reason = max(wants, key=lambda name: wants[name])
        usual = max(forecast, memory.demand_s, memory.slow_s)
        lower = max(usual / memory.limit, *wants.values()) / (1.0 - DOWN_MARGIN)
        return _whole(wants[reason]), _whole(lower), reason

    def _learnt(self, load: Load, pool: Pool, memory: _Memory, needed: int) -> tuple[_Memory, str]:
        """Learn from the share of lost objectives by adding a replica: if much less is lost
        afterwards, replicas hold less than assumed; if not, the loss is accepted. Returns why one
        is added, if so."""
        options = self.options
        settle_s = options.startup_s + 2 * self._slow_s
        busy = memory.grown_s >= 0 and load.now_s - memory.grown_s < settle_s
        if busy or load.ready < pool.target or memory.asked <= 0:
            return memory, ""
        lost = memory.lost / memory.asked
        if memory.trial > 0:
            # The new replica has helped: the limit is below the load at which SLOs were lost.
            if lost < 0.6 * memory.trial:
                limit = max(MIN_LIMIT, min(memory.limit, 0.9 * memory.trial_load))
                memory = memory._replace(limit=limit)
            else:
                memory = memory._replace(borne=max(lost, memory.trial))
            memory = memory._replace(trial=0.0)
        allowed = max(1.0 - options.attainment, 1.5 * memory.borne)
        # Few in the time over which they are counted are chance.
        chance = memory.lost * self._slow_s < 3.0
        if lost <= allowed or chance or needed > pool.target or pool.target >= pool.most:
            return memory, ""
        held = memory.demand_s / load.ready
        return (
            memory._replace(trial=lost, trial_load=held),
            f"{lost:.1%} lost at a load of {held:.2f} each",
        )

    def _lowered(self, load: Load, pool: Pool, memory: _Memory, needed: int) -> tuple[int, _Memory]:
        """Shrink where it has been possible for long enough."""
        if needed >= pool.target:
            return pool.bounded(pool.target), memory._replace(low_since_s=-1.0, low_most=0)
        since_s = memory.low_since_s if memory.low_since_s >= 0 else load.now_s
        most = max(memory.low_most, needed)
        memory = memory._replace(low_since_s=since_s, low_most=most)
        if load.now_s - since_s < self.options.down_after_s:
            return pool.bounded(pool.target), memory
        target = pool.bounded(max(most, pool.target - 1))
        return target, memory._replace(low_since_s=load.now_s, low_most=needed)


def _whole(replicas: float) -> int:
    """Up to a whole number; what is above it by rounding alone does not count."""
    return ceil(replicas - 1e-9)
