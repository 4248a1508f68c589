"""A workload as columns: what a run reads instead of objects, and where it writes its times."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from sluice.scheduling.placement.output_lengths import LengthPredictor, TaskLengths
from sluice.scheduling.request.deadline import resumed_ttft_s
from sluice.scheduling.request.kernels import (
    ARRIVAL,
    BEST_EFFORT,
    COMPUTED,
    DRAFTED,
    E2E,
    EMITTED,
    EXPECTED,
    FIELDS,
    FIRST_TOKEN,
    KV_BLOCKS,
    LAST_TOKEN,
    LEAST,
    PENDING,
    PRIORITY,
    PROMISED,
    PROMPT,
    RUNNING,
    TPOT,
    TTFT,
    Floats,
    Ints,
)
from sluice.scheduling.request.objective import SLO, Times, TPOTAnchor
from sluice.scheduling.request.queue import row_of
from sluice.scheduling.request.stages import Stage as RestStage
from sluice.scheduling.request.stages import later_of
from sluice.simulation.rows import ADMISSION, OFFSET, PRIVATE, STAGES_LEFT, TARGET
from sluice.simulation.workload import Stage, Workload

_MIN_STEP = 1 / 16
"""A request that outgrows a prediction is expected to have at least this share more."""


class Retry(NamedTuple):
    """A refused request's retry, ``retry_after_s`` after the refusal; whether it was promised."""

    key: int
    at_s: float
    retry_after_s: float
    promised: bool


class Requests:
    """The requests of one run, by key: the index in the workload. A stage is one prefill-and-decode
    pair; the policy sees the next one as a fresh request with its context computed.

    Attributes:
        slos: by key, the objective that a policy sees now: the planned one where it was promised.
        rows, private: each as an engine gets it: as it arrived, or when its engine failed.
        first_stage: ``int64[requests + 1]``; offsets: ``int64[stages + 1]`` into emission times.
        emitted_s: ``float64[all output tokens]``; nan before.
        times: ``emitted_s`` with one entry more, for tokens that no client gets."""

    def __init__(self, workload: Workload, predictor: LengthPredictor | None = None) -> None:
        self.workload = workload
        self.arrivals = list(workload.arrivals)
        self.slos: list[SLO] = [arrival.slo.at_stage(0, 0.0) for arrival in self.arrivals]
        self.failures: dict[int, str] = {}
        self.promised_s: Floats = np.full(len(self.arrivals), nan)
        # Of requests of several stages, all of what is planned.
        self._planned: dict[int, SLO] = {}
        self.whole_stages = not any(arrival.stages for arrival in self.arrivals)
        """Whether no request has several stages."""
        self.retries: list[Retry] = []
        """The retries of refused requests, in order."""
        self.quoted: dict[int, tuple[tuple[float, ...], ...]] = {}
        """The quoted times of requests, where they ask for quotes."""
        self.hashed = any(arrival.block_hashes for arrival in self.arrivals)
        """Whether any prompt states which blocks it has."""
        self.depths: dict[int, int] = {}
        """Tokens of a prompt up to the end of each of its hashed blocks, by hash."""
        for arrival in self.arrivals:
            ends = range(workload.block_tokens, 1 << 62, workload.block_tokens)
            self.depths.update(zip(arrival.block_hashes, ends, strict=False))
        self.followers: dict[int, list[int]] = {}
        """By request, the turns of loops that wait for its end."""
        for key, arrival in enumerate(self.arrivals):
            for before in arrival.after:
                self.followers.setdefault(before, []).append(key)
        self._predictor = predictor if predictor is not None else TaskLengths()
        self._columns()

    def _columns(self) -> None:
        stages = [a.stages or (Stage(a.output_tokens, a.slo),) for a in self.arrivals]
        counts = [len(own) for own in stages]
        flat = [stage for own in stages for stage in own]
        self.stage_slos = [stage.slo for stage in flat]
        self.stage_tokens: Ints = np.array([stage.output_tokens for stage in flat], np.int64)
        self.stage_request: Ints = np.repeat(np.arange(len(stages)), counts)
        self.first_stage: Ints = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self.offsets: Ints = np.concatenate(([0], np.cumsum(self.stage_tokens)))
        self.times: Floats = np.full(int(self.offsets[-1]) + 1, nan)
        self.emitted_s: Floats = self.times[:-1]
        rows = [
            row_of(
                *(slo, a.arrival_s, a.prompt_tokens),
                tenant=a.tenant,
                weight=a.weight,
                program=0 if a.turn is None else a.turn.program,
            )
            for slo, a in zip(self.slos, self.arrivals, strict=True)
        ]
        self.rows: Floats = np.array(rows).reshape(len(rows), FIELDS)
        self.private: Ints = np.zeros((len(rows), PRIVATE), np.int64)
        first = self.first_stage[:-1]
        self.private[:, TARGET] = self.stage_tokens[first]
        self.private[:, OFFSET] = self.offsets[first]
        self.private[:, STAGES_LEFT] = np.array(counts, np.int64) - 1

    def __len__(self) -> int:
        return len(self.arrivals)

    def whole_tokens(self, key: int) -> int:
        """Tokens of a request at its end, prompts of later stages included."""
        arrival = self.arrivals[key]
        later = sum(stage.prompt_tokens for stage in arrival.stages)
        return arrival.prompt_tokens + arrival.output_tokens + later

    def first_token_s(self, key: int) -> float:
        """When its first token left; nan before."""
        return float(self.emitted_s[self.offsets[self.first_stage[key]]])

    def begun(self, key: int) -> bool:
        """Whether its first token has left."""
        return not isnan(self.first_token_s(key))

    def context_tokens(self, key: int) -> int:
        """Its prompt, and what engines that failed have emitted."""
        return int(self.rows[key, PROMPT])

    def arrived_at(self, key: int, now_s: float) -> None:
        """A turn of a loop arrives, or a refused request again: its times count from now."""
        self.arrivals[key] = self.arrivals[key]._replace(arrival_s=now_s)
        self.rows[key, ARRIVAL] = now_s

    def bound(self, key: int, e2e_s: float) -> None:
        """A turn without stages is to end this long after its arrival, if not earlier."""
        slo = self.arrivals[key].slo
        self.restate(key, replace(slo, e2e_s=min(e2e_s, slo.columns[2])))

    def restate(self, key: int, slo: SLO) -> None:
        """A request without stages states another objective."""
        self.arrivals[key] = self.arrivals[key]._replace(slo=slo)
        self.slos[key] = self.stage_slos[self.first_stage[key]] = slo
        self.rows[key, [TTFT, TPOT, E2E]] = slo.columns[:3]

    def degrade(self, key: int, slo: SLO, tokens: int) -> None:
        """A request without stages is served with this objective, and at most ``tokens``."""
        self.restate(key, slo)
        tokens = min(tokens, self.arrivals[key].output_tokens)
        self.arrivals[key] = self.arrivals[key]._replace(output_tokens=tokens)
        self.stage_tokens[self.first_stage[key]] = self.private[key, TARGET] = tokens
        self.rows[key, EXPECTED] = np.fmin(self.rows[key, EXPECTED], tokens)
        self.rows[key, LEAST] = min(self.rows[key, LEAST], tokens)

    def predict(self, key: int) -> None:
        """Write the predicted length of an arriving request into its row."""
        arrival = self.arrivals[key]
        expected = self._predictor.predict(arrival.task, arrival.prompt_tokens)
        self.rows[key, EXPECTED] = expected
        if arrival.slo.tpot_anchor is TPOTAnchor.MEAN and not arrival.stages:
            self.rows[key, LEAST] = self._predictor.least(arrival.task)

    def serve_as(
        self,
        key: int,
        best_effort: bool,
        promised_s: float = nan,
        stated: SLO | None = None,
        planned: Times | None = None,
    ) -> None:
        """Write a placed request's fields; ``promised_s`` is nan without a promise. The engine
        plans by ``planned``, or by ``stated``."""
        row = self.rows[key]
        row[BEST_EFFORT] = best_effort
        row[PROMISED] = not isnan(promised_s)
        if stated is not None:
            self._plan(key, stated, stated.times_s if planned is None else planned)
        if not self.begun(key):
            self.promised_s[key] = promised_s

    def _plan(self, key: int, stated: SLO, planned: Times) -> None:
        slo = stated.with_times(planned)
        if slo.stages:
            self._planned[key] = slo
            slo = slo.at_stage(0, 0.0)
        self.slos[key] = slo
        self.rows[key, [TTFT, TPOT, E2E]] = slo.columns[:3]

    @property
    def best_effort(self) -> NDArray[np.bool_]:
        """By request, whether it was placed as best effort."""
        served: NDArray[np.bool_] = self.rows[:, BEST_EFFORT] > 0
        return served

    def prolong(self, key: int, row: Floats, private: Ints) -> None:
        """Raise the expected length of a request that continues beyond it, as a replica does."""
        before = int(private[OFFSET] - self.offsets[self.first_stage[key]])
        emitted = before + int(row[EMITTED])
        longer = (1 + _MIN_STEP) * emitted
        if isinstance(self._predictor, TaskLengths):
            lengths = self._predictor.distribution(self.arrivals[key].task)
            if lengths is not None:
                longer = max(longer, lengths.given(emitted))
        row[EXPECTED] = longer - before

    def interrupted(self, key: int, row: Floats, private: Ints) -> None:
        """Its engine failed: another resumes it with emitted tokens in the prompt."""
        emitted = int(row[EMITTED])
        rest, own = self.rows[key], self.private[key]
        rest[:] = row
        rest[PROMPT] = rest[PENDING] = row[PROMPT] + emitted
        rest[EXPECTED] = max(row[EXPECTED] - emitted, 1.0)
        rest[LEAST] = max(row[LEAST] - emitted, 0.0)
        rest[COMPUTED] = rest[EMITTED] = rest[KV_BLOCKS] = rest[RUNNING] = rest[DRAFTED] = 0.0
        rest[FIRST_TOKEN] = rest[LAST_TOKEN] = nan
        own[:] = private
        own[TARGET] -= emitted
        own[OFFSET] += emitted
        own[ADMISSION:PRIVATE] = 0

    def rest(self, key: int, now_s: float) -> SLO:
        """The objective of a resumed stream's rest, also written to its row."""
        row = self.rows[key]
        whole = self.arrivals[key].slo
        if not self.begun(key):
            return whole
        stage = int(self.first_stage[key + 1] - 1 - self.private[key, STAGES_LEFT])
        slo = self.stage_slos[stage]
        ttft_s, tpot_s = slo.columns[:2]
        if ttft_s < inf:
            emitted = int(self.private[key, OFFSET] - self.offsets[stage])
            ttft_s = resumed_ttft_s(ttft_s, tpot_s, emitted, now_s - float(row[ARRIVAL]))
            row[TTFT] = ttft_s
            slo = replace(slo, ttft_s=ttft_s)
        later = whole.stages[stage + 1 - int(self.first_stage[key]) :]
        if not later:
            return slo
        stages = (RestStage(*slo.times_s), *later)
        return SLO.of_stages(stages, None, slo.priority, slo.service_class, slo.tpot_anchor)

    def later(self, keys: Ints, private: Ints) -> Floats | None:
        """What replicas report of stages to come, a row each; ``None`` where no request has
        several."""
        if self.whole_stages:
            return None
        found = np.zeros((len(keys), 3))
        found[:, 0] = inf
        for place in np.flatnonzero(private[: len(keys), STAGES_LEFT] > 0).tolist():
            key = int(keys[place])
            slo = self._planned.get(key, self.arrivals[key].slo)
            found[place] = later_of(
                slo.stages, len(slo.stages) - 1 - int(private[place, STAGES_LEFT])
            )
        return found

    def finished(self, key: int) -> None:
        """A request has all its output: the predictor learns from it."""
        arrival = self.arrivals[key]
        self._predictor.observe(arrival.task, arrival.output_tokens)

    def next_stage(self, key: int, row: Floats, private: Ints, now_s: float) -> None:
        """Turn the engine's row of a request whose stage has ended into that of its next one."""
        last = int(self.first_stage[key + 1])
        index = last - int(private[STAGES_LEFT])
        arrival = self.arrivals[key]
        stage = arrival.stages[index - int(self.first_stage[key])]
        planned = self._planned.get(key, arrival.slo)
        # Of a request that was resumed, the stages that were left then are planned.
        number = len(planned.stages) - int(private[STAGES_LEFT])
        slo = self.slos[key] = planned.at_stage(number, now_s - arrival.arrival_s)
        row[PROMPT] += row[EMITTED] + stage.prompt_tokens
        row[PENDING] += stage.prompt_tokens
        row[EXPECTED] = max(row[EXPECTED] - row[EMITTED], 1.0)
        row[EMITTED] = row[DRAFTED] = 0.0
        row[FIRST_TOKEN] = row[LAST_TOKEN] = nan
        row[ARRIVAL] = now_s
        row[TTFT : PRIORITY + 1] = slo.columns
        private[TARGET] = stage.output_tokens
        private[OFFSET] = self.offsets[index]
        private[STAGES_LEFT] -= 1
