"""The walk over a virtual replica against SLOs-Serve's dynamic program on the same requests."""

from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.scheduling.admission.slos_serve.policy import (
    SLOsServeAdmission,
    SLOsServeAdmissionOptions,
)
from sluice.scheduling.admission.slos_serve.selection import PlanDemand, Supply, admissible
from sluice.scheduling.fleet import rows as figure
from sluice.scheduling.fleet.fleet import Fleet
from sluice.scheduling.fleet.report import Reservation
from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.request.kernels import most_work_s
from sluice.scheduling.request.objective import SLO, Anchor
from sluice.scheduling.routing import Job, RouteQuery
from tests.examples import examples
from tests.scheduling.fleets import fleet_of, job, report, row

MODEL = LinearLatency(a=0.010, b=0.000_1, c=0.000_001)
BATCH_TOKENS = 2_000


def decided(fleet: Fleet, query: RouteQuery, now_s: float, headroom: float, anchor: Anchor) -> bool:
    options = SLOsServeAdmissionOptions.model_validate(
        {"headroom": headroom, "batch_tokens": BATCH_TOKENS, "anchor": anchor}
    )
    return bool(SLOsServeAdmission(options).promises(job(fleet, query, now_s), fleet).holds[0])


Columns = tuple[float, float, float, float]


def demand(columns: list[Columns]) -> PlanDemand:
    """Requests of (due, prefill, TPOT, decode step), seconds; memory is another test's."""
    due_s, prefill_s, tpot_s, step_s = np.array(columns, np.float64).reshape(-1, 4).T
    none = np.zeros(len(due_s))
    return PlanDemand(due_s, prefill_s, tpot_s, step_s[:, np.newaxis].copy(), none, none + 1.0)


def by_program(fleet: Fleet, made: Job, headroom: float, anchor: Anchor) -> bool:
    """The dynamic program's answer, on demands taken from the requests that the fleet was told."""
    usable = 1.0 - headroom
    fixed_s = MODEL.a / usable
    decodes: list[Columns] = []
    queue: list[Columns] = []
    reported = fleet._reports[0]
    assert reported is not None
    for each in reported.rows:
        if each["best_effort"]:
            continue
        tpot_s = float(each["tpot_s"])
        if each["emitted_tokens"]:
            own_s = MODEL.work_s(1, int(each["computed_tokens"]))
            pace_s = max(tpot_s, MODEL.a + own_s)
            decodes.append((0.0, 0.0, pace_s, own_s / usable))
        else:
            new, computed = int(each["pending_tokens"]), int(each["computed_tokens"])
            due_s = float(each["arrival_s"]) + float(each["ttft_s"])
            own_s = MODEL.work_s(1, new + computed)
            pace_s = max(tpot_s, MODEL.a + own_s)
            queue.append((due_s, MODEL.work_s(new, computed) / usable, pace_s, own_s / usable))
    for taken in fleet.ledger.at("0"):
        if taken.promised:
            own_s = MODEL.work_s(1, int(taken.new_tokens + taken.cached_tokens))
            work_s = MODEL.work_s(int(taken.new_tokens), int(taken.cached_tokens))
            pace_s = max(taken.tpot_s, MODEL.a + own_s)
            queue.append((taken.due_s, work_s / usable, pace_s, own_s / usable))
    queue.sort(key=lambda each: each[0])
    longest_s = (MODEL.a + MODEL.work_s(BATCH_TOKENS, 0)) / usable

    def runs_s(tpot_s: float, step_s: float) -> float:
        """Time from one run of a decode to the next."""
        if anchor is Anchor.FIRST_TOKEN:
            return tpot_s
        return max(1.0, np.floor(tpot_s / step_s + 1e-9)) * step_s

    gone_s = made.now_s - float(fleet.figures[0, figure.SPENT_UNTIL_S])
    while queue and gone_s > 0:
        paced = [each for each in decodes if each[2] < inf]
        step_s = min([longest_s, *(each[2] for each in paced)])
        rate = 1 - fixed_s / step_s - sum(each[3] / runs_s(each[2], step_s) for each in paced)
        due_s, prefill_s, pace_s, own_s = queue[0]
        if rate <= 0:
            break
        if prefill_s > gone_s * rate:
            queue[0] = (due_s, prefill_s - gone_s * rate, pace_s, own_s)
            break
        gone_s -= prefill_s / rate
        decodes.append((0.0, 0.0, pace_s, own_s))
        queue.pop(0)
    promised = decodes + [(each[0] - made.now_s, *each[1:]) for each in queue]
    slo = made.query.slo
    own_s = float(most_work_s(MODEL.pieces, 1.0, float(made.query.prompt_tokens)))
    asking = (
        made.due_s - made.now_s,
        float(made.work_s[0]) / usable,
        slo.columns[1],
        own_s / usable,
    )
    supply = Supply(np.array([fixed_s]), np.ones(1), longest_s, 1e9, 1_000, anchor)
    return bool(admissible(demand([asking]), demand(promised), supply)[0])


SLOS = [SLO(ttft_s=t, tpot_s=p) for t in (0.2, 0.6, 1.5, None) for p in (0.02, 0.05, 0.1, None)]
slos = st.sampled_from(SLOS[:-1])
tokens = st.integers(2, 4_000)
waiting = st.builds(row, slos, tokens, arrival_s=st.floats(-1.0, 0.0))
decoding = st.builds(
    lambda slo, prompt, emitted: row(slo, prompt, emitted=emitted, first_token_s=-0.01),
    slos,
    tokens,
    st.integers(1, 50),
)
others = st.builds(row, slos, tokens, best_effort=st.just(True), running=st.booleans())


@settings(max_examples=examples(400))
@given(
    rows=st.lists(st.one_of(waiting, decoding, others), max_size=14),
    reserved=st.lists(st.tuples(slos, tokens), max_size=4),
    slo=slos,
    prompt=tokens,
    gone_s=st.sampled_from([0.0, 0.01, 0.1, 0.4]),
    headroom=st.sampled_from([0.0, 0.1]),
    anchor=st.sampled_from([Anchor.FIRST_TOKEN, Anchor.LAST_TOKEN]),
)
def test_it_promises_what_the_dynamic_program_admits(
    rows: list[np.ndarray],
    reserved: list[tuple[SLO, int]],
    slo: SLO,
    prompt: int,
    gone_s: float,
    headroom: float,
    anchor: Anchor,
) -> None:
    fleet = fleet_of(report(*rows, latency=MODEL, free_blocks=1_000_000))
    for key, (each, size) in enumerate(reserved):
        due_s, tpot_s = each.columns[0], each.columns[1]
        taken = Reservation("0", 0.0, True, size, 0, size, due_s, tpot_s, 1, 100)
        fleet.reserve(key + 1, taken)
    query = RouteQuery(99, slo, prompt)
    made = job(fleet, query, gone_s)
    expected = by_program(fleet, made, headroom, anchor)
    assert decided(fleet, query, gone_s, headroom, anchor) == expected
