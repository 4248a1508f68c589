"""Why promised requests were late: their time by cause, from the stamps of their attempts and from
what late requests' engines report (:mod:`sluice.scheduling.request.lateness`)."""

from __future__ import annotations

from math import inf

from sluice.router.dispatch.attempt import Answer, Attempt
from sluice.router.metrics.instruments import RequestFigures
from sluice.scheduling.request.lateness import ENGINE, Cause, Parts, allowance, split


def late_parts(answer: Answer, figures: RequestFigures) -> dict[str, Parts]:
    """Of each missed objective the lateness by cause, seconds, the largest part first. The lateness
    of a TPOT is that of all tokens after the first."""
    call, clock, slo = answer.call, answer.clock, figures.slo
    ttft_due_s, tpot_due_s, e2e_due_s, _ = slo.columns
    first_s = clock.first_token_s
    until, predicted_s = _until_first(answer, figures.ended_s if first_s is None else first_s)
    decision = answer.decision
    allowed = allowance(until, predicted_s, decision.own_s, decision.kv_transfer_s)
    if until[Cause.UNKNOWN]:
        allowed = {Cause.UNKNOWN: predicted_s}
    if first_s is None:  # the client left before
        due_s = {"ttft": ttft_due_s, "e2e": e2e_due_s}
        age_s = figures.age_s
        return {x: split(until, allowed, age_s - s) for x, s in due_s.items() if age_s > s}

    found: dict[str, Parts] = {}
    ttft_s, tpot_s, e2e_s = figures.judged_s or (figures.ttft_s, figures.tpot_s, figures.e2e_s)
    if "ttft" in figures.missed:
        found["ttft"] = split(until, allowed, max(0.0, (ttft_s or 0.0) - ttft_due_s))
    last_s, later = clock.last_token_s or first_s, max(1, clock.tokens - 1)
    if "tpot" in figures.missed:
        left_s = later * tpot_due_s
        after = _after_first(answer, last_s - first_s, left_s)
        lateness_s = max(0.0, later * (tpot_s or 0.0) - left_s)
        found["tpot"] = split(after, {Cause.DECODES: left_s}, lateness_s)
    if "e2e" in figures.missed:
        left_s = max(0.0, e2e_due_s - sum(allowed.values()))
        after = _after_first(answer, last_s - first_s, left_s)
        after[Cause.WAY_BACK] += max(0.0, call.received_s + figures.e2e_s - last_s)
        whole = {cause: until[cause] + after[cause] for cause in Cause}
        allowed[Cause.DECODES] = allowed.get(Cause.DECODES, 0.0) + left_s
        found["e2e"] = split(whole, allowed, max(0.0, (e2e_s or 0.0) - e2e_due_s))
    return found


def _until_first(answer: Answer, first_s: float) -> tuple[dict[Cause, float], float]:
    """The time from arrival to the first token, and how much from the decision on was predicted."""
    call, waits, decision = answer.call, answer.waits, answer.decision
    found = dict.fromkeys(Cause, 0.0)
    found[Cause.EDGE] = waits.asked_s - call.received_s
    found[Cause.ADMISSION_QUEUE] = waits.queue_s
    found[Cause.REPLICA_START] = waits.start_s + waits.pool_s
    asking_s = waits.decided_s - waits.asked_s
    found[Cause.DECISION] = max(0.0, asking_s - waits.queue_s - waits.start_s)
    attempts = _phases(answer)
    begun_s = attempts[0].made_s if attempts else waits.decided_s
    between = Cause.FAILURE if answer.made > 1 else Cause.PREFILLS if answer.moved else Cause.EDGE
    found[between] += max(0.0, begun_s - waits.decided_s - waits.pool_s)

    # From the first attempt that answered.
    slo = call.slo if decision.planned is None else call.slo.with_times(decision.planned)
    planned_s = slo.columns[0]
    predicted_s = decision.predicted_ttft_s
    if predicted_s is None:
        predicted_s = min(planned_s, slo.columns[2])
    age_s = begun_s - call.received_s
    if not attempts:
        found[Cause.UNKNOWN] = max(0.0, first_s - begun_s)
    for place, attempt in enumerate(attempts):
        last = place == len(attempts) - 1
        ended_s = first_s if last else attempt.last_item_s
        left_s = call.received_s + planned_s - attempt.made_s
        _add(found, attempt, 0, ended_s - attempt.made_s, left_s)
        if not last:
            found[Cause.EDGE] += attempts[place + 1].made_s - ended_s
    return found, max(0.0, predicted_s - age_s + found[Cause.DECISION])


def _after_first(answer: Answer, seconds: float, left_s: float) -> dict[Cause, float]:
    """The time after the first token, of which ``left_s`` are for decodes."""
    waits, found = answer.waits, dict.fromkeys(Cause, 0.0)
    found[Cause.FAILURE], found[Cause.KV_TRANSFER] = waits.failed_s, waits.moved_s
    seconds = max(0.0, seconds - waits.failed_s - waits.moved_s)
    _add(found, answer.opened[-1], 1, seconds, left_s)
    if len(answer.opened) > 1:  # the attempts before have not reported
        found[Cause.DECODES] += found[Cause.WAY_BACK]
        found[Cause.WAY_BACK] = 0.0
    elif answer.tail is not None and not answer.tail.late_parts:
        found[Cause.DECODES] = min(seconds, left_s)
    return found


def _phases(answer: Answer) -> list[Attempt]:
    """The attempts that made the first token: with a separate prefill, two."""
    first = answer.opened[:1]
    prefill = first[0].prefill if first else None
    return first if prefill is None else [prefill, *first]


def _add(
    found: dict[Cause, float], attempt: Attempt, half: int, seconds: float, left_s: float
) -> None:
    """Add ``seconds`` at one replica, before (``half`` 0) or after its first token. Of a request
    that was in time at its engine only what exceeds ``left_s``, which was on the way."""
    seconds = max(0.0, seconds)
    if attempt.tail is None:
        found[Cause.UNKNOWN] += seconds
        return
    parts = attempt.tail.late_parts[half * len(ENGINE) : (half + 1) * len(ENGINE)]
    if not parts:
        found[Cause.WAY_BACK] += max(0.0, seconds - max(0.0, left_s))
        return
    whole_s = sum(parts)
    scale = min(1.0, seconds / (whole_s or inf))
    for cause, part_s in zip(ENGINE, parts, strict=True):
        found[cause] += scale * part_s
    found[Cause.WAY_BACK] += seconds - scale * whole_s
