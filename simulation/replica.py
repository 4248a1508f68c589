"""The clock of a simulated cluster, and its replicas' engines, reports and incidents."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

import numpy as np

from sluice.scheduling.batching import BatchPolicy
from sluice.scheduling.fleet.report import Report
from sluice.scheduling.fleet.state import ROW
from sluice.scheduling.fleet.transfer import NO_TRANSFERS, Transfers
from sluice.scheduling.roles import Role
from sluice.simulation.config import ClusterConfig, Failure, Resize, Slowdown
from sluice.simulation.engine import StuckError, VirtualEngine
from sluice.simulation.mirror import PREFILL_KEYS, CellMirrors, Sent, VirtualMirror

Handler = Callable[[], object]


class Events:
    """Calls at virtual times, equal times in order of scheduling. ``O(log n)``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Handler]] = []
        self._order = count()

    def at(self, when_s: float, handler: Handler) -> None:
        """Call ``handler`` at ``when_s``, or now if that has passed."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), handler))

    def after(self, seconds: float, handler: Handler) -> None:
        """Call ``handler`` in ``seconds`` from now."""
        self.at(self.now_s + seconds, handler)

    def run_next(self) -> bool:
        """Move the clock to the next event and run it; ``False`` if there is none."""
        if not self._heap:
            return False
        self.now_s, _, handler = heapq.heappop(self._heap)
        handler()
        return True


_NO_ROWS = np.zeros(0, ROW)


class Shared(NamedTuple):
    """What the replicas of a run have in common; ``rng``: of lost reports. ``finished`` gets the
    requests that are complete at a replica: all output emitted, or KV computed for another one;
    ``noticed`` what a failed one held, when the router notices."""

    config: ClusterConfig
    events: Events
    mirror: VirtualMirror | CellMirrors
    rng: np.random.Generator
    finished: Callable[[VirtualReplica, list[int]], None]
    noticed: Callable[[VirtualReplica, list[int]], None]


class VirtualReplica:
    """Steps its engine whenever it has requests, and reports to a mirror."""

    def __init__(self, name: str, role: Role, engine: VirtualEngine, shared: Shared) -> None:
        self.name = name
        self.role = role
        self.engine = engine
        self.alive = True
        events = shared.events
        self.draining = False
        self.started_s = events.now_s
        self.ended_s: float | None = None
        self.drained_s: float | None = None
        """How long it took from :meth:`drain` until it was empty, seconds."""
        self._drain_at_s = 0.0
        self.given: list[int] = []
        self._shared = shared
        self._events = events
        self._mirror = shared.mirror.of(name)
        self._stepping = False
        self._waking = False
        self._kept = 0
        self._giving: dict[int, Callable[[], None]] = {}
        # Number of steps, and what is to be called after them.
        self._asked: list[tuple[int, Callable[[], None]]] = []
        self._transfers = NO_TRANSFERS
        self._made_s = self._stepped_s = events.now_s
        self._timer = 0
        self._mirror.register(name, self.given, self._report(), events.now_s)
        self._plan_report()

    def submit(self, key: int) -> bool:
        """Take a request; ``False`` if it can never run here."""
        return self._took(key, self.engine.submit(key))

    def prefill(self, key: int, kv_transfer_s: float) -> bool:
        """Compute a request's context for another replica; ``False``: it can never run."""
        return self._took(key + PREFILL_KEYS, self.engine.prefill(key, kv_transfer_s))

    def take_over(self, key: int, tokens: int, seconds: float) -> bool:
        """Take a request with the KV of its first ``tokens``, which took ``seconds`` to transfer;
        ``False``: it can never run."""
        count, all_seconds, all_tokens = self._transfers
        self._transfers = Transfers(count + 1, all_seconds + seconds, all_tokens + tokens)
        return self._took(key, self.engine.take_over(key, tokens))

    def _took(self, key: int, accepted: bool) -> bool:
        self.given.append(key)
        if accepted:
            self._wake()
            if self.engine.live == 1:
                self._plan_report()
        return accepted

    def follow(self, role: Role, policy: BatchPolicy) -> None:
        """Have another role, and plan with ``policy`` where that of the role differs."""
        self.role = role
        self.engine.follow(policy)

    def fail(self) -> list[int]:
        """Die; return the requests that it had."""
        self._end()
        return self.engine.fail()

    def drain(self) -> None:
        """Take no more requests, and leave when those that it has are done."""
        self.draining = True
        self._drain_at_s = self._events.now_s
        self._send_report()
        self._leave_if_done()

    def give_away(self, key: int, then: Callable[[], None]) -> None:
        """Stop a request at the step's end and call ``then``, unless it has ended."""
        self._giving[key] = then

    def give_cached(self, then: Callable[[], None]) -> None:
        """Call ``then`` once a step can have given what is cached: at the end of the one after that
        under way."""
        self._asked.append((2 if self._stepping else 0, then))
        if not self._stepping:
            self._give()

    def _give(self) -> None:
        """A step has ended, or this replica has."""
        asked, self._asked = self._asked, []
        for steps, then in asked:
            if steps > 1 and self.alive and self.engine.live:
                self._asked.append((steps - 1, then))
            else:
                then()

    def keep(self, tokens: int) -> int:
        """Hold the KV of ``tokens`` that is being sent away; return how many blocks that is."""
        blocks = self.engine.hold(-(-tokens // self.engine.config.block_tokens))
        self._kept += blocks
        return blocks

    def let_go(self, blocks: int) -> None:
        """They have been sent."""
        self._kept -= blocks
        if self.alive:
            self.engine.release(blocks)
            self._wake()
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self.draining and self.alive and not self.engine.live and not self._kept:
            self._end()
            self.drained_s = self._events.now_s - self._drain_at_s

    def _end(self) -> None:
        self.alive = False
        self.ended_s = self._events.now_s
        self._give()

    def _wake(self) -> None:
        """Begin a step once all that comes at this moment is there."""
        if not self._stepping and not self._waking:
            self._waking = True
            self._events.after(0.0, self._begin_if_idle)

    def _begin_if_idle(self) -> None:
        self._waking = False
        if self.alive and self.engine.live and not self._stepping:
            self._begin()

    def _begin(self) -> None:
        try:
            seconds = self.engine.begin(self._events.now_s)
        except StuckError:
            if not self._kept:
                raise
            # All KV is in transfer; the next attempt is at the end of a transfer.
            return
        self._stepping = True
        self._events.after(seconds, self._complete)

    def _complete(self) -> None:
        if not self.alive:
            return
        self._stepping = False
        self._stepped_s = self._events.now_s
        finished = self.engine.complete(self._stepped_s)
        if finished:
            self._shared.finished(self, finished)
        giving, self._giving = self._giving, {}
        for key, then in giving.items():
            if self.engine.withdraw(key):
                then()
        self._give()
        if self.engine.live:
            self._begin()
        self._leave_if_done()

    def _plan_report(self) -> None:
        """The next report is due an interval or a heartbeat after the last one."""
        config = self._shared.config
        wait_s = config.report_interval_s if self.engine.live else config.heartbeat_s
        self._timer += 1
        self._events.at(self._made_s + wait_s, partial(self._report_due, self._timer))

    def _report_due(self, timer: int) -> None:
        # A request that came to an idle replica has set an earlier timer.
        if self.alive and timer == self._timer:
            self._send_report()
            self._plan_report()

    def _send_report(self) -> None:
        self._made_s = self._events.now_s
        if self._shared.rng.random() >= self._shared.config.report_loss:
            at_s = self._made_s + self._shared.config.report_delay_s
            arrives = partial(self._mirror.receive, self.name, self._report(), at_s)
            self._events.at(at_s, arrives)

    def _report(self) -> Sent:
        engine = self.engine
        report = Report(
            _NO_ROWS,
            self._events.now_s,
            0.0,
            self._stepped_s,
            engine.planner.reported,
            engine.free_blocks,
            engine.config.kv_blocks,
            engine.config.block_tokens,
            engine.config.max_sequences,
            self.draining,
            role=self.role,
            transfers=self._transfers,
            local_order=engine.local_order,
        )
        held = engine.cache.held if engine.cache is not None else frozenset()
        return Sent(engine.queue.table.copy(), report, len(self.given), held, engine.later)


DETECTED_AFTER_S = 0.05
"""From a replica's failure until the router detects it."""

Incident = Failure | Resize | Slowdown
"""What happens to replicas in a run."""


class Replicas:
    """Starts the replicas of the configuration, and those of incidents and autoscaling."""

    def __init__(self, shared: Shared, make_engine: Callable[[Role, int], VirtualEngine]) -> None:
        self.started: list[VirtualReplica] = []
        """Every replica that there was, in order of start."""
        self.named: dict[str, VirtualReplica] = {}
        """The same by name."""
        counts = shared.config.counts
        self.roles = tuple(role for role, count in counts.items() if count)
        """Those of the configuration."""
        self._shared = shared
        self._make_engine = make_engine
        for role in self.roles:
            self._grow(role, counts[role])

    def change(self, role: Role, change: int) -> None:
        """Add ``change`` replicas of a role; if negative, the youngest leave."""
        if change >= 0:
            self._grow(role, change)
            return
        serving = [r for r in self.started if r.role == role and r.alive and not r.draining]
        for replica in serving[change:]:
            replica.drain()

    def happening(self, incident: Incident) -> Callable[[], None]:
        """What to do at ``incident``. Raises ValueError for an unknown role or a factor <= 0."""
        match incident:
            case Failure():
                return partial(self._fail, incident)
            case Slowdown():
                if not 0 < incident.factor < inf:
                    words = f"a slowdown's factor must be positive, got {incident.factor}"
                    raise ValueError(words)
                return partial(self._slow_down, incident)
            case Resize():
                if incident.role not in self.roles:
                    known = ", ".join(self.roles)
                    words = f"no replica has the role {incident.role!r}; there are: {known}"
                    raise ValueError(words)
                return partial(self.change, incident.role, incident.change)

    def _grow(self, role: Role, count: int) -> None:
        for _ in range(count):
            name, engine = f"{role}-{len(self.started)}", self._make_engine(role, len(self.started))
            replica = VirtualReplica(name, role, engine, self._shared)
            self.started.append(replica)
            self.named[name] = replica

    def _alive(self, number: int) -> VirtualReplica | None:
        """The replica with a number, if it is there."""
        known = 0 <= number < len(self.started)
        return self.started[number] if known and self.started[number].alive else None

    def _slow_down(self, slowdown: Slowdown) -> None:
        replica = self._alive(slowdown.replica)
        if replica is not None:
            replica.engine.slowness = slowdown.factor

    def _fail(self, failure: Failure) -> None:
        replica = self._alive(failure.replica)
        if replica is None:
            return
        keys = replica.fail()
        shared = self._shared
        shared.events.after(DETECTED_AFTER_S, partial(shared.noticed, replica, keys))
        if failure.down_s is not None:
            shared.events.after(failure.down_s, partial(self._grow, replica.role, 1))
