"""What arrives, when and with which objective. Transformations are pure and seeded, and described
in the result: thinning breaks bursts up, stretching keeps every burst and makes it slower."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean
from typing import NamedTuple, Self

from msgspec import structs

import sluice.scheduling.request.stages
from sluice.scheduling.request.objective import SLO

AS_RECORDED = "as recorded"


class Stage(NamedTuple):
    """One prefill-and-decode pair of several (SLOs-Serve §2.1); its objective counts from its
    start. ``prompt_tokens`` enter before it; 0 if it continues decoding, and for the first one."""

    output_tokens: int
    slo: SLO
    prompt_tokens: int = 0


class Turn(NamedTuple):
    """A turn of an agent's loop. It arrives ``gap_s`` after the last of the requests ``after``
    (their indices, all below its own) has ended; if there are none, at its ``arrival_s``. ``tool``:
    what its answer calls, empty if it ends its session; ``parent``: a sub-agent's, else 0."""

    session: int
    parent: int = 0
    tool: str = ""
    after: tuple[int, ...] = ()
    gap_s: float = 0.0

    @property
    def program(self) -> int:
        """The session that its work counts for."""
        return self.parent or self.session


class Arrival(NamedTuple):
    """One request, ``arrival_s`` seconds from the workload's start. Policies never see
    ``output_tokens`` (of all stages); ``task`` predicts them; ``block_hashes`` identify the
    prompt's blocks, empty: nothing is shared; empty ``stages``: one with ``slo``."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO
    task: str = ""
    block_hashes: tuple[int, ...] = ()
    stages: tuple[Stage, ...] = ()
    tenant: int = 0
    weight: float = 1.0
    turn: Turn | None = None

    @property
    def after(self) -> tuple[int, ...]:
        """The requests that must end before it arrives."""
        return self.turn.after if self.turn is not None else ()

    @classmethod
    def of_stages(
        cls, arrival_s: float, prompt_tokens: int, stages: Sequence[Stage], task: str = ""
    ) -> Self:
        """A request of stages whose objectives, but not lengths, are known at arrival."""
        first = stages[0].slo
        stated = [
            sluice.scheduling.request.stages.Stage(
                *stage.slo.times_s, prompt_tokens=stage.prompt_tokens
            )
            for stage in stages
        ]
        slo = SLO.of_stages(stated, None, first.priority, first.service_class, first.tpot_anchor)
        output_tokens = sum(stage.output_tokens for stage in stages)
        return cls(arrival_s, prompt_tokens, output_tokens, slo, task, (), tuple(stages))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, ``block_tokens`` per block hash. Raises :class:`ValueError`
    with the index: unordered times, a length below 1, stages that do not add up."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 512
    scaling: str = AS_RECORDED
    description: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {self.block_tokens}")
        before_s = 0.0
        for index, arrival in enumerate(self.arrivals):
            problem = _problem(arrival, before_s, index)
            if problem:
                raise ValueError(f"workload {self.name}: request {index}: {problem}")
            before_s = arrival.arrival_s

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def duration_s(self) -> float:
        """From the workload's start to the last arrival, seconds."""
        return self.arrivals[-1].arrival_s if self.arrivals else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second from first to last arrival; 0 below two, infinite if all at
        once."""
        if len(self) < 2:
            return 0.0
        between_s = self.duration_s - self.arrivals[0].arrival_s
        return (len(self) - 1) / between_s if between_s > 0 else inf

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length at arrival, tokens; 0 without requests."""
        return fmean(arrival.prompt_tokens for arrival in self.arrivals) if self.arrivals else 0.0

    @property
    def tightest_tpot_s(self) -> float:
        """The smallest TPOT that a request states, seconds; infinite without any."""
        return min((arrival.slo.columns[1] for arrival in self.arrivals), default=inf)

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length over all stages, tokens; 0 without requests."""
        return fmean(arrival.output_tokens for arrival in self.arrivals) if self.arrivals else 0.0


def thinned(workload: Workload, share: float, seed: int) -> Workload:
    """Keep each request with probability ``share``, in (0, 1], independently of the others."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    _check_open(workload)
    rng = random.Random(seed)
    kept = tuple(arrival for arrival in workload.arrivals if rng.random() < share)
    return _scaled(workload, kept, f"thinned to a share of {share:g} (seed {seed})")


def stretched(workload: Workload, factor: float) -> Workload:
    """Multiply every arrival time by ``factor``, > 0: above 1 the traffic is slower."""
    if not 0 < factor < inf:
        raise ValueError(f"factor must be positive and finite, got {factor}")
    moved = tuple(a._replace(arrival_s=a.arrival_s * factor) for a in workload.arrivals)
    return _scaled(workload, moved, f"time stretched by {factor:.4g}")


def window(workload: Workload, start_s: float, seconds: float) -> Workload:
    """The requests that arrive in ``[start_s, start_s + seconds)``, with times from ``start_s``."""
    if not (start_s >= 0 and seconds > 0):
        raise ValueError(f"a window needs start_s >= 0 and seconds > 0, got {start_s}, {seconds}")
    _check_open(workload)
    times = [arrival.arrival_s for arrival in workload.arrivals]
    first, last = bisect_left(times, start_s), bisect_left(times, start_s + seconds)
    cut = tuple(
        arrival._replace(arrival_s=arrival.arrival_s - start_s)
        for arrival in workload.arrivals[first:last]
    )
    note = f"Window of {seconds:g} s from {start_s:g} s."
    return replace(workload, arrivals=cut, description=_joined(workload.description, note))


def with_objectives(
    workload: Workload, assign: Callable[[Arrival], SLO], description: str
) -> Workload:
    """Give each request ``assign``'s objective, described by ``description``. Raises
    :class:`ValueError`: a request has stages, which have their own."""
    if any(arrival.stages for arrival in workload.arrivals):
        raise ValueError(f"workload {workload.name} has stages with objectives of their own")
    changed = tuple(arrival._replace(slo=assign(arrival)) for arrival in workload.arrivals)
    return replace(
        workload, arrivals=changed, description=_joined(workload.description, description)
    )


def with_priorities(workload: Workload, shares: Mapping[int, float], seed: int) -> Workload:
    """Draw each request's priority by relative ``shares``; its stages have the same one."""
    if not shares or not all(0 < share < inf for share in shares.values()):
        raise ValueError(f"shares must be positive numbers, one per priority, got {dict(shares)}")
    names, weights = list(shares), list(shares.values())
    drawn = random.Random(seed).choices(names, weights, k=len(workload))
    made: dict[tuple[SLO, int], SLO] = {}

    def prioritised(slo: SLO, priority: int) -> SLO:
        key = (slo, priority)
        if key not in made:
            made[key] = structs.replace(slo, priority=priority)
        return made[key]

    changed = tuple(
        arrival._replace(
            slo=prioritised(arrival.slo, priority),
            stages=tuple(s._replace(slo=prioritised(s.slo, priority)) for s in arrival.stages),
        )
        for arrival, priority in zip(workload.arrivals, drawn, strict=True)
    )
    parts = ", ".join(f"{name} with share {share:g}" for name, share in shares.items())
    note = f"Priorities drawn independently: {parts} (seed {seed})."
    return replace(workload, arrivals=changed, description=_joined(workload.description, note))


def merged(name: str, workloads: Sequence[Workload]) -> Workload:
    """All requests of ``workloads``, by arrival; only those of the same part share a prefix or a
    session. Raises :class:`ValueError`: none, or different block sizes."""
    if len({workload.block_tokens for workload in workloads}) != 1:
        raise ValueError(f"workload {name}: the parts must have one block size")
    arrivals: list[Arrival] = []
    offset = first = sessions = 0
    for workload in workloads:
        numbers: dict[int, int] = {}
        for arrival in workload.arrivals:
            hashes = tuple(
                numbers.setdefault(block, offset + len(numbers)) for block in arrival.block_hashes
            )
            turn = arrival.turn
            if turn is not None:
                turn = turn._replace(
                    session=sessions + turn.session,
                    parent=turn.parent and sessions + turn.parent,
                    after=tuple(first + each for each in turn.after),
                )
            arrivals.append(arrival._replace(block_hashes=hashes, turn=turn))
        offset += len(numbers)
        first += len(workload)
        sessions = max((each.turn.session for each in arrivals if each.turn), default=0)
    order = sorted(range(len(arrivals)), key=lambda index: arrivals[index].arrival_s)
    return Workload(
        name,
        tuple(reordered(arrivals, order)),
        workloads[0].block_tokens,
        "; ".join(f"{part.name}: {part.scaling}" for part in workloads),
        _joined(*(f"{part.name}: {part.description}" for part in workloads)),
    )


def reordered(arrivals: Sequence[Arrival], order: Sequence[int]) -> list[Arrival]:
    """``arrivals`` in another order, in which turns still follow the same requests."""
    place = {old: new for new, old in enumerate(order)}
    moved = []
    for old in order:
        turn = arrivals[old].turn
        if turn is not None and turn.after:
            turn = turn._replace(after=tuple(place[each] for each in turn.after))
        moved.append(arrivals[old]._replace(turn=turn))
    return moved


def _check_open(workload: Workload) -> None:
    if any(arrival.after for arrival in workload.arrivals):
        raise ValueError(f"workload {workload.name} has loops, whose turns belong together")


def _problem(arrival: Arrival, before_s: float, index: int) -> str:
    """What is wrong with ``arrival``, which follows one at ``before_s``; empty if nothing is."""
    if any(not 0 <= each < index for each in arrival.after):
        return f"follows the requests {arrival.after}, which must all come before it"
    if not isfinite(arrival.arrival_s) or arrival.arrival_s < before_s:
        return f"arrives at {arrival.arrival_s} s, after one at {before_s} s"
    if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
        lengths = f"{arrival.prompt_tokens} and {arrival.output_tokens}"
        return f"prompt and output must have at least 1 token, got {lengths}"
    if not arrival.stages:
        return ""
    if arrival.stages[0].prompt_tokens:
        return "the first stage's prompt is the arrival's; its own must be 0"
    if any(stage.output_tokens < 1 or stage.prompt_tokens < 0 for stage in arrival.stages):
        return "a stage needs at least 1 output token and no less than 0 prompt tokens"
    total = sum(stage.output_tokens for stage in arrival.stages)
    if total != arrival.output_tokens:
        return f"its stages have {total} output tokens, the request {arrival.output_tokens}"
    return ""


def _scaled(workload: Workload, arrivals: tuple[Arrival, ...], how: str) -> Workload:
    """``arrivals`` with what was done to their rate added to what was done before."""
    scaling = how if workload.scaling == AS_RECORDED else f"{workload.scaling}, then {how}"
    return replace(workload, arrivals=arrivals, scaling=scaling)


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)
