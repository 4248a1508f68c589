"""What the requests of a run experienced: latencies, attained objectives, gain.

A request's figure is the worst of its stages; without all its output it attains nothing. A gain
function maps emission times and objective to a number, summed over requests (ProServe §2)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.kernels import Floats, Ints, compiled, next_due_s
from sluice.scheduling.request.objective import SLO, WINDOW_TOKENS, Anchor, GainWeights, TPOTAnchor
from sluice.simulation.requests import Requests
from sluice.simulation.workload import Workload

ENVELOPE = Anchor.ENVELOPE.code


@compiled
def token_deadlines_s(
    arrival_s: float, ttft_s: float, tpot_s: float, e2e_s: float, emitted_s: Floats
) -> Floats:
    """Deadline of each token of a stage; an objective that is not stated is infinite."""
    due_s = np.empty(emitted_s.shape[0])
    for token in range(emitted_s.shape[0]):
        first_s = emitted_s[0] if token > 0 else nan
        last_s = emitted_s[token - 1] if token > 0 else nan
        due_s[token] = next_due_s(
            token, arrival_s, ttft_s, tpot_s, e2e_s, first_s, last_s, ENVELOPE
        )
    return due_s


Flags = NDArray[np.bool_]


class TPOTMetric(enum.StrEnum):
    """How a stage's time per output token is measured: a ``TPOTAnchor``, or ``ENVELOPE``: the
    largest ``(t_i - a - TTFT) / (i - 1)``, at least 0, the TPOT that keeps TDG's deadlines; without
    a TTFT it counts from the first token."""

    MEAN = TPOTAnchor.MEAN.value
    RUNNING_MAX = TPOTAnchor.RUNNING_MAX.value
    WINDOW = TPOTAnchor.WINDOW.value
    ENVELOPE = "envelope"


@dataclass(frozen=True, slots=True)
class Stages:
    """Figures per stage, arrays of one length; seconds, nan where there is no figure. ``request``
    is the key; times count from ``start_s``, the arrival or the end of the stage before; ``tpot_s``
    is nan with fewer than two tokens."""

    request: Ints
    start_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    tpot_s: dict[TPOTMetric, Floats]
    emitted: Ints
    complete: Flags


def stages(requests: Requests) -> Stages:
    """Measure every stage. ``O(tokens)``."""
    emitted_s, offsets = requests.emitted_s, requests.offsets
    first = offsets[:-1]
    left = ~np.isnan(emitted_s)
    emitted: Ints = left.astype(np.int64)
    if len(emitted):
        emitted = np.add.reduceat(emitted, first)
    complete = emitted == requests.stage_tokens
    arrival_s = np.array([arrival.arrival_s for arrival in requests.arrivals])
    start_s = arrival_s[requests.stage_request]
    later = np.ones(len(first), np.bool_)
    later[requests.first_stage[:-1]] = False
    start_s[later] = emitted_s[first[later] - 1]
    ttft_s = emitted_s[first] - start_s
    return Stages(
        requests.stage_request,
        start_s,
        ttft_s,
        emitted_s[first + requests.stage_tokens - 1] - start_s,
        _tpots(requests, start_s, emitted),
        emitted,
        complete,
    )


def _tpots(requests: Requests, start_s: Floats, emitted: Ints) -> dict[TPOTMetric, Floats]:
    times, offsets = requests.emitted_s, requests.offsets
    if not len(times):
        return {metric: np.empty(0) for metric in TPOTMetric}
    first = offsets[:-1]
    stage = np.repeat(np.arange(len(first)), np.diff(offsets))
    index = np.arange(len(times)) - first[stage]
    some = emitted >= 2
    last = first + np.maximum(emitted, 1) - 1
    mean = np.where(some, (times[last] - times[first]) / np.maximum(emitted - 1, 1), nan)
    steps = np.maximum(index, 1)

    def most(values: Floats) -> Floats:
        # A first token has no TPOT, and a token that did not leave has none either.
        values = np.where((index > 0) & ~np.isnan(values), values, -np.inf)
        return np.where(some, np.maximum.reduceat(values, first), nan)

    running = most((times - times[first][stage]) / steps)
    objective = column(requests, 0)
    base_s = np.where(np.isinf(objective), times[first], start_s + objective)
    envelope = np.maximum(most((times - base_s[stage]) / steps), 0.0)
    windows = most(_windows(times, index, first[stage] + emitted[stage] - 1))
    window = np.where((emitted > WINDOW_TOKENS) & (windows > -np.inf), windows, mean)
    return {
        TPOTMetric.MEAN: mean,
        TPOTMetric.RUNNING_MAX: running,
        TPOTMetric.WINDOW: window,
        TPOTMetric.ENVELOPE: envelope,
    }


def _windows(times: Floats, index: Ints, last: Ints) -> Floats:
    """Per token, its window's mean time per token; nan below 10 tokens."""
    places = np.arange(len(times))
    ends = np.append(times[1:] != times[:-1], True) | (places == last)
    group_ends = np.flatnonzero(ends)
    group = np.searchsorted(group_ends, places)
    end = group_ends[group]
    # The last group that ends at least a window before.
    before = np.searchsorted(group_ends, end - WINDOW_TOKENS, side="right") - 1
    begin = group_ends[np.maximum(before, 0)]
    known = (before >= 0) & (begin >= places - index)
    return np.where(known, (times - times[begin]) / np.maximum(end - begin, 1), nan)


def column(requests: Requests, index: int) -> Floats:
    """One of :attr:`SLO.columns <sluice.scheduling.request.objective.SLO.columns>` per stage."""
    return np.array([slo.columns[index] for slo in requests.stage_slos])


def judged_tpot_s(requests: Requests, measured: Stages, metric: TPOTMetric | None = None) -> Floats:
    """By stage, the TPOT that its objective is held against: ``metric``, else the stated anchor."""
    if metric is not None:
        return measured.tpot_s[metric]
    anchors = np.array([slo.tpot_anchor.value for slo in requests.stage_slos])
    found = np.full(len(anchors), nan)
    for anchor in set(anchors.tolist()):
        found = np.where(anchors == anchor, measured.tpot_s[TPOTMetric(anchor)], found)
    return found


def metric_name(metric: TPOTMetric | None, slos: Iterable[SLO]) -> str:
    """What results call that TPOT: ``stated`` where the objectives have several anchors."""
    if metric is not None:
        return metric.value
    anchors = {slo.tpot_anchor for slo in slos} or {TPOTAnchor.MEAN}
    return anchors.pop().value if len(anchors) == 1 else "stated"


def attained(requests: Requests, measured: Stages, metric: TPOTMetric | None = None) -> Flags:
    """By request: all output, and every objective met (``<=``)."""
    tpot_s = judged_tpot_s(requests, measured, metric)
    met = measured.complete & (measured.ttft_s <= column(requests, 0))
    met &= np.isnan(tpot_s) | (tpot_s <= column(requests, 1))
    met &= measured.e2e_s <= column(requests, 2)
    all_met: Flags = np.ones(len(requests), np.bool_)
    np.logical_and.at(all_met, measured.request, met)
    return all_met


@dataclass(frozen=True, slots=True)
class Gain:
    """Token-level deadline gain by request, and what it would be with every token in time."""

    gain: Floats
    ideal: Floats

    @property
    def ratio(self) -> float:
        """Sum over sum, the TDG ratio of ProServe's figures; nan without requests."""
        ideal = float(self.ideal.sum())
        return float(self.gain.sum()) / ideal if ideal > 0 else nan


def workload_weights(workload: Workload) -> GainWeights:
    """ProServe's weights: a first token is worth the mean input, a later one the mean output."""
    if not len(workload):
        return GainWeights()
    return GainWeights(workload.mean_prompt_tokens, workload.mean_output_tokens)


def deadline_gain(requests: Requests, measured: Stages, weights: GainWeights | None = None) -> Gain:
    """ProServe Eq. 3: the weight of each token before its deadline, times the priority."""
    of_token = token_gain(requests, measured, weights)
    owner = np.repeat(requests.stage_request, np.diff(requests.offsets))
    gain, ideal = (
        np.bincount(owner, each, len(requests)).astype(np.float64)
        for each in (of_token.gain, of_token.ideal)
    )
    return Gain(gain, ideal)


def token_gain(requests: Requests, measured: Stages, weights: GainWeights | None = None) -> Gain:
    """The same of each token, in the order of ``requests.emitted_s``."""
    weights = weights or workload_weights(requests.workload)
    times, offsets = requests.emitted_s, requests.offsets
    first = offsets[:-1]
    stage = np.repeat(np.arange(len(first)), np.diff(offsets))
    index = np.arange(len(times)) - first[stage]
    priority = column(requests, 3)
    worth = np.where(index == 0, weights.first, weights.later) * priority[stage]
    ttft_s, tpot_s, e2e_s = (column(requests, index) for index in range(3))
    due_s = _due_s(measured.start_s, ttft_s, tpot_s, e2e_s, offsets, times)
    # A token that did not leave is nan, which compares as false.
    return Gain(np.where(times < due_s, worth, 0.0), worth)


@compiled
def _due_s(
    start_s: Floats,
    ttft_s: Floats,
    tpot_s: Floats,
    e2e_s: Floats,
    offsets: Ints,
    emitted_s: Floats,
) -> Floats:
    """Deadline of every token, by stage."""
    due_s = np.empty(emitted_s.shape[0])
    for stage in range(start_s.shape[0]):
        own = slice(offsets[stage], offsets[stage + 1])
        due_s[own] = token_deadlines_s(
            start_s[stage], ttft_s[stage], tpot_s[stage], e2e_s[stage], emitted_s[own]
        )
    return due_s


def worst_by_request(requests: Requests, measured: Stages, values: Floats) -> Floats:
    """The largest of a request's stages; nan where no stage has the figure."""
    worst = np.full(len(requests), -np.inf)
    np.fmax.at(worst, measured.request, values)
    return np.where(np.isinf(worst), nan, worst)
