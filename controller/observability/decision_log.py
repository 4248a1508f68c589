"""The latest decisions and their reasons.

To keep decisions fast, the deciding actor keeps only their inputs (``recent_decisions``); the
explanation is written here when the log is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np

from sluice.controller.observability.recent_decisions import DecisionRecord
from sluice.protocol.messages import RequestEnding
from sluice.scheduling.admission.base import Constraint, DecodeChoice, Promises
from sluice.scheduling.placement.placer import DecisionInputs
from sluice.scheduling.request.job import (
    NO_REPLICA,
    UNATTAINABLE,
    RouteDecision,
    RouteQuery,
    Tier,
)
from sluice.scheduling.routing.base import RoutingPolicy

OTHERS = 3
"""Replicas shown besides the chosen one."""

_MORE_WORK = "its backlog is longer"
_CANNOT = "it cannot meet the SLO"
_TRIAL = "the chosen replica was due for a trial request after its quarantine"


_CONSTRAINTS = {
    Constraint.TTFT: "TTFT",
    Constraint.TPOT: "TPOT",
    Constraint.GUARANTEES: "earlier guarantees",
    Constraint.KV_MEMORY: "KV memory",
    Constraint.SEQUENCES: "running sequences",
    Constraint.PREFILL_BUDGET: "prefill budget",
    Constraint.OVERTAKING: "requests of more worth that are expected",
}

_OVER_SHARE = "Its client has used its share of guaranteed capacity, and others request theirs"


class DecisionLog:
    """Explains decisions of the policy ``routing``."""

    def __init__(self, routing: RoutingPolicy) -> None:
        self._routing = routing

    def explained(
        self, records: Sequence[DecisionRecord], now_s: float
    ) -> Iterator[dict[str, Any]]:
        """Decisions as of ``now_s`` (deciding actor's clock), the latest first, as plain JSON
        data. About 50 us each."""
        latest: dict[str, int] = {}
        for record in records:
            latest.setdefault(record.query.request_id, record.query.key)
        for record in records:
            again = latest[record.query.request_id] != record.query.key
            yield self._shown(record, now_s) | _ended(record, tried_again=again)

    def _shown(self, entry: DecisionRecord, now_s: float) -> dict[str, Any]:
        query, decision, weighed = entry.query, entry.decision, entry.weighed
        slo = query.slo
        ttft_s, tpot_s, e2e_s, priority = slo.columns
        source = decision.prefill_id or decision.kv_from
        shown: dict[str, Any] = {
            "age_ms": _ms(now_s - entry.decided_s),
            "request_id": query.request_id or None,
            "client_request_id": query.client_request_id or None,
            "key": f"{query.key:016x}",
            "class": slo.service_class,
            "objective": {
                "ttft_ms": _ms(ttft_s),
                "tpot_ms": _ms(tpot_s),
                "e2e_ms": _ms(e2e_s),
                "priority": int(priority),
            },
            "prompt_tokens": int(query.prompt_tokens),
            "waited_ms": _ms(query.waited_s),
            "asked": entry.asked,
            "outcome": decision.reason,
            "over_share": decision.over_share,
            "moved_from": query.moves_from or None,
            "tier": None if decision.tier is None else decision.tier.value,
            "not_guaranteed": _not_guaranteed(entry),
            "constraints": _constraints(weighed),
            "waits_ms": _waits(weighed),
            "replica_id": decision.replica_id,
            "role": None if decision.replica_id is None else decision.role,
            "prefill_id": decision.prefill_id,
            "kv_from": decision.kv_from,
            "kv_transfer_ms": None if source is None else _ms(decision.kv_transfer_s),
            "predicted_ttft_ms": _ms(decision.predicted_ttft_s),
            "retry_after_ms": _ms(decision.retry_after_s),
            "took_ms": _ms(entry.took_s),
            "policy": self._routing.name,
            "known": None if weighed is None else weighed.known,
            "candidates": 0 if weighed is None else len(weighed.job.rows),
            "able": _able(weighed),
            "why": self._why(entry),
            "chosen": None,
            "others": [],
            "second": None,
        }
        if weighed is not None:
            self._compare(shown, decision, weighed)
            if weighed.second is not None:
                shown["second"] = self._second(weighed, weighed.second)
        return shown

    def _why(self, entry: DecisionRecord) -> str:
        """Why the request was placed as it was; of a P/D pair, the reasons for both replicas."""
        why, weighed = self._why_there(entry), entry.weighed
        if entry.decision.prefill_id is None or weighed is None or weighed.second is None:
            return why
        of, able = len(weighed.second.job.rows), _count(weighed.second.promises)
        able_words = "" if able is None else f", of which {able} can meet the rest of the SLO"
        return f"{why} It is the prefill replica; one of {of} others decodes{able_words}."

    def _why_there(self, entry: DecisionRecord) -> str:
        decision, weighed = entry.decision, entry.weighed
        if decision.starts_in_s is not None:
            late = decision.reason == UNATTAINABLE
            end = "; that is too late for its SLO, and its class does not allow best effort"
            starts = (
                f"The model has no replica; the first one serves in {decision.starts_in_s:.0f} s"
            )
            return f"{starts}{end if late else ''}."
        if decision.reason == NO_REPLICA or weighed is None:
            return "No replica is available: none has reported lately, or all are drained."
        able = _able(weighed)
        of_all = f"{len(weighed.job.rows)} replicas"
        of = f"{able} of {of_all}"
        if _is_trial(decision, weighed):
            return f"A trial of a replica that was in quarantine and can serve it: one of {of_all}."
        cannot = f"No replica can meet the SLO{_bound(weighed)}"
        if decision.reason == UNATTAINABLE:
            first = _OVER_SHARE if decision.over_share else cannot
            return f"{first}; its class does not allow best effort."
        if decision.tier is None:
            return f"No guarantee, because admission is off; {self._routing.name} chose."
        if decision.tier is Tier.GUARANTEED:
            promised = f"{of} can meet the SLO; {self._routing.name} chose among them."
            return f"{_moved(entry.query)}{promised}"
        if able is None:
            states = entry.query.slo.stated
            asks = "It asks for best effort, as batch requests do"
            first = asks if states else "It states no SLO"
        elif decision.over_share:
            first = _OVER_SHARE
        elif able:
            first = "No healthy replica has reported lately, so nothing is guaranteed"
        else:
            first = cannot
        return (
            f"{_moved(entry.query)}{first}: served as best effort by the replica with the shortest "
            "backlog."
        )

    def _compare(
        self, shown: dict[str, Any], decision: RouteDecision, weighed: DecisionInputs
    ) -> None:
        """Add the chosen replica and the best of the others, each with its figures."""
        job, promises = weighed.job, weighed.promises
        names = [weighed.ids[row] for row in job.rows.tolist()]
        count = len(names)
        first = decision.prefill_id or decision.replica_id
        chosen = names.index(first) if first in names else None
        if decision.tier is Tier.BEST_EFFORT or promises is None:
            assert weighed.ahead_s is not None
            order = np.argsort(weighed.ahead_s, kind="stable")
        else:
            order = np.lexsort((promises.ttft_s, ~promises.holds))
        places = [int(place) for place in order[: OTHERS + 1] if place != chosen][:OTHERS]
        shown["others"] = [
            _figures(weighed, names, place) | {"why_not": self._why_not(decision, weighed, place)}
            for place in places
        ]
        shown["others_left_out"] = count - len(places) - (chosen is not None)
        if chosen is not None:
            shown["chosen"] = _figures(weighed, names, chosen)

    def _second(self, weighed: DecisionInputs, second: DecodeChoice) -> dict[str, Any]:
        """The decode replica for a prefill replica of the query, and the best of the other
        candidates, each with its figures."""
        job, promises = second.job, second.promises
        names = [weighed.ids[row] for row in job.rows.tolist()]
        holds = np.ones(len(names), bool) if promises is None else promises.holds
        order = np.argsort(~holds, kind="stable").tolist()
        places = [place for place in order[: OTHERS + 1] if place != second.chosen][:OTHERS]
        figures = weighed._replace(job=job, promises=promises, ahead_s=None)
        passed_over = self._routing.decode_passed_over
        return {
            "candidates": len(names),
            "able": _count(promises),
            "kv_transfer_ms": _ms(second.kv_transfer_s),
            "chosen": _figures(figures, names, second.chosen),
            "others": [
                _figures(figures, names, place)
                | {"why_not": passed_over if holds[place] else _cannot(promises, place)}
                for place in places
            ],
            "others_left_out": len(names) - len(places) - 1,
        }

    def _why_not(self, decision: RouteDecision, weighed: DecisionInputs, place: int) -> str:
        if _is_trial(decision, weighed):
            return _TRIAL
        if decision.tier is Tier.BEST_EFFORT:
            return _MORE_WORK
        if weighed.promises is not None and not weighed.promises.holds[place]:
            return _cannot(weighed.promises, place)
        return self._routing.passed_over


def _ended(entry: DecisionRecord, tried_again: bool) -> dict[str, Any]:
    """How the request ended, if its router has reported that. The ending belongs to the
    request's last decision: after the earlier ones it was retried."""
    request_id = entry.query.request_id
    tried_again = tried_again and request_id != ""
    ending = None if tried_again else entry.ending
    if ending is None:
        return {"tried_again": tried_again, "ended": None}
    judged = entry.query.slo.stated
    return {"tried_again": False, "ended": ending_shown(ending, judged)}


def ending_shown(ending: RequestEnding, judged: bool = True) -> dict[str, Any]:
    """How a request ended; ``judged``: it stated an objective."""
    return {
        "outcome": ending.outcome,
        "error": ending.error or None,
        "attained": not ending.missed if judged and ending.outcome == "ok" else None,
        "missed": list(ending.missed),
        "tokens": ending.tokens,
        "ttft_ms": _ms(ending.ttft_s),
        "tpot_ms": _ms(ending.tpot_s),
        "e2e_ms": _ms(ending.e2e_s),
        "cause": ending.late[0][0] if ending.late else None,
        "late_ms": {cause: _ms(part_s) for cause, part_s in ending.late},
    }


def _not_guaranteed(entry: DecisionRecord) -> str | None:
    """Machine-readable reason why the request was not promised; ``None`` if it was. Of several
    constraints, the one that binds at the replica that could give a promise soonest."""
    query, decision, weighed = entry.query, entry.decision, entry.weighed
    if decision.tier is Tier.GUARANTEED:
        return None
    if weighed is None:
        return "no_replica"
    if decision.over_share:
        return "over_share"
    promises = weighed.promises
    if promises is None:
        if decision.tier is None:
            return "admission_off"
        return "best_effort_asked" if query.slo.stated else "no_objective"
    if promises.holds.any():
        return "silent"
    return Constraint(promises.binds[promises.wait_s.argmin()]).name.lower()


def _constraints(weighed: DecisionInputs | None) -> dict[str, int]:
    """Number of replicas at which each constraint prevented a promise."""
    if weighed is None or weighed.promises is None:
        return {}
    promises = weighed.promises
    found = Counter(promises.binds[~promises.holds].tolist())
    return {Constraint(bound).name.lower(): count for bound, count in found.most_common()}


def _waits(weighed: DecisionInputs | None) -> dict[str, float | None] | None:
    """See ``Placer.waits_s``; ``None`` where that was not recorded."""
    if weighed is None or weighed.waits_s is None:
        return None
    return {name: _ms(wait_s) for name, wait_s in weighed.waits_s.items()}


def _bound(weighed: DecisionInputs) -> str:
    """The binding constraints, in brackets: the name of a single one, or all with the number of
    replicas at which each binds."""
    found = [
        (_CONSTRAINTS[Constraint[name.upper()]], n) for name, n in _constraints(weighed).items()
    ]
    if len(found) == 1:
        return f" ({found[0][0]})"
    return f" ({', '.join(f'{name} at {count}' for name, count in found)})" if found else ""


def _cannot(promises: Promises | None, place: int) -> str:
    if promises is None or not promises.binds[place]:
        return _CANNOT
    return f"{_CANNOT}: {_CONSTRAINTS[Constraint(promises.binds[place])]}"


def _is_trial(decision: RouteDecision, weighed: DecisionInputs) -> bool:
    """Whether the request is a trial request of a replica in quarantine."""
    tried = {weighed.ids[row] for row in weighed.untried}
    return bool(tried & {decision.replica_id, decision.prefill_id})


def _moved(query: RouteQuery) -> str:
    """Why a request that was already placed was decided on again."""
    if query.brings_kv:
        return f"It ran at {query.moves_from}, and moved with its KV. "
    if query.moves_from:
        return f"Its first token was predicted to be late at {query.moves_from}. "
    return ""


def _able(weighed: DecisionInputs | None) -> int | None:
    return None if weighed is None else _count(weighed.promises)


def _count(promises: Promises | None) -> int | None:
    """Number of replicas that can give a promise; ``None`` if none was requested."""
    return None if promises is None else int(promises.holds.sum())


def _figures(weighed: DecisionInputs, names: list[str], place: int) -> dict[str, Any]:
    """The decision's figures of the replica at index ``place``."""
    job, promises, ahead_s = weighed.job, weighed.promises, weighed.ahead_s
    return {
        "replica_id": names[place],
        "prompt_only": bool(job.splits[place]),
        "prefill_ms": _ms(job.work_s[place]),
        "cached_tokens": int(job.cached_tokens[place]),
        "ahead_ms": (
            None if ahead_s is None else _ms(ahead_s[place] - job.work_s[place] - job.lead_s[place])
        ),
        "can_promise": None if promises is None else bool(promises.holds[place]),
        "predicted_ttft_ms": None if promises is None else _ms(promises.ttft_s[place]),
        "could_promise_in_ms": (
            None if promises is None or promises.holds[place] else _ms(promises.wait_s[place])
        ),
    }


def _ms(seconds: float | None) -> float | None:
    """Milliseconds to the microsecond; ``None`` for what is not finite, which JSON cannot hold."""
    if seconds is None or not isfinite(seconds):
        return None
    return round(float(seconds) * 1000, 3)
