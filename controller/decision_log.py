"""The latest decisions and why they fell as they did: "why did my request go there?"

A decision must not pay for this, so what it was made from is kept as it is, and made into words
when somebody reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from controller.endings import Endings
from scheduling.admission.base import Promises
from scheduling.admission.constraint import Constraint
from scheduling.job import NO_REPLICA, UNATTAINABLE, RouteDecision, RouteQuery, Tier
from scheduling.pairs import DecodeChoice
from scheduling.placement import DecisionInputs
from scheduling.routing.base import RoutingPolicy

DECISIONS = 256
"""Decisions kept."""

OTHERS = 3
"""Replicas shown besides the chosen one."""

_MORE_WORK = "more work is ahead there"
_CANNOT = "it cannot promise the objective"
_TRIAL = "the chosen one was to be tried after its quarantine"


_CONSTRAINTS = {
    Constraint.TTFT: "TTFT",
    Constraint.TPOT: "TPOT",
    Constraint.GUARANTEES: "earlier guarantees",
    Constraint.KV_MEMORY: "KV memory",
    Constraint.SEQUENCES: "running sequences",
    Constraint.PREFILL_BUDGET: "prefill budget",
}

_OVER_SHARE = "Its client has its share of what can be promised, and others ask for theirs"


class Entry(NamedTuple):
    """One decision.

    Attributes:
        query, decision: what was asked and answered.
        decided_s: when, seconds on the controller's clock. took_s: how long it took.
        asked: how often this request has asked, this time included: one that waits asks again.
        weighed: what it was made from; ``None`` where no replica could be chosen.
    """

    query: RouteQuery
    decision: RouteDecision
    decided_s: float
    took_s: float
    asked: int
    weighed: DecisionInputs | None


_Fields = tuple[RouteQuery, RouteDecision, float, float, int, DecisionInputs | None]
"""Those of an :class:`Entry`."""


class DecisionLog:
    """The last decisions, one per request: a request that asks again replaces its last decision.

    Noting one is ``O(1)``, amortised. What is kept are references to arrays with a number per
    replica, so memory is in proportion to ``limit`` times the replicas.

    Args:
        routing: the policy that chooses.
        limit: most decisions.
    """

    def __init__(self, routing: RoutingPolicy, limit: int = DECISIONS) -> None:
        self._routing = routing
        self._limit = limit
        # The fields of entries by key, the latest last, and up to twice as many as are wanted.
        # Bare tuples and a bare dict, because decisions wait for this.
        self._entries: dict[int, _Fields] = {}
        self._weighed: DecisionInputs | None = None
        self.endings = Endings()
        """How the requests ended."""

    def __len__(self) -> int:
        return min(self._limit, len(self._entries))

    def weigh(self, weighed: DecisionInputs) -> None:
        """What the decision under way is made from; :meth:`note` follows."""
        self._weighed = weighed

    def note(
        self, query: RouteQuery, decision: RouteDecision, decided_s: float, took_s: float
    ) -> None:
        """A decision was made on a valid query."""
        weighed, self._weighed = self._weighed, None
        # The one that was decided on may have an earlier plan than what was asked for.
        if weighed is not None and weighed.job.query.key != query.key:
            weighed = None  # of one that failed halfway
        entries = self._entries
        earlier = entries.pop(query.key, None)
        asked = 1 if earlier is None else Entry._make(earlier).asked + 1
        entries[query.key] = (query, decision, decided_s, took_s, asked, weighed)
        if len(entries) > 2 * self._limit:
            self._entries = dict(islice(entries.items(), len(entries) - self._limit, None))

    def latest(self, limit: int, now_s: float) -> Iterator[dict[str, Any]]:
        """The last decisions as of now, the latest first, as plain data that JSON can hold. Each
        takes some 50 us when it is its turn; what is decided meanwhile changes nothing."""
        entries = list(islice(self._kept(), limit))
        latest: dict[str, int] = {}
        for entry in entries:
            latest.setdefault(entry.query.request_id, entry.query.key)
        return (
            self._told(entry, now_s)
            | self._ended(entry, tried_again=latest[entry.query.request_id] != entry.query.key)
            for entry in entries
        )

    def took_ms(self) -> dict[str, float | int | None]:
        """How long the decisions in the log took, milliseconds."""
        took = np.array([entry.took_s for entry in self._kept()]) * 1000
        if not len(took):
            return {"count": 0, "p50": None, "p99": None, "max": None}
        p50, p99 = np.percentile(took, (50, 99)).tolist()
        return {"count": len(took), "p50": p50, "p99": p99, "max": float(took.max())}

    def _kept(self) -> Iterator[Entry]:
        """The latest first."""
        return map(Entry._make, islice(reversed(self._entries.values()), self._limit))

    def _told(self, entry: Entry, now_s: float) -> dict[str, Any]:
        query, decision, weighed = entry.query, entry.decision, entry.weighed
        slo = query.slo
        ttft_s, tpot_s, e2e_s, priority = slo.columns
        told: dict[str, Any] = {
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
            "replica_id": decision.replica_id,
            "role": None if decision.replica_id is None else decision.role,
            "prefill_id": decision.prefill_id,
            "handover_ms": None if decision.prefill_id is None else _ms(decision.handover_s),
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
            self._compare(told, decision, weighed)
            if weighed.second is not None:
                told["second"] = self._second(weighed, weighed.second)
        return told

    def _ended(self, entry: Entry, tried_again: bool) -> dict[str, Any]:
        """How the request ended, where its router has told. That is of its last decision: after an
        earlier one it was tried again."""
        request_id = entry.query.request_id
        tried_again = tried_again and request_id != ""
        ending = None if tried_again else self.endings.of(request_id)
        if ending is None:
            return {"tried_again": tried_again, "ended": None}
        judged = ending.outcome == "ok" and entry.query.slo.stated
        return {
            "tried_again": False,
            "ended": {
                "outcome": ending.outcome,
                "error": ending.error or None,
                "attained": not ending.missed if judged else None,
                "missed": list(ending.missed),
                "tokens": ending.tokens,
                "ttft_ms": _ms(ending.ttft_s),
                "tpot_ms": _ms(ending.tpot_s),
                "e2e_ms": _ms(ending.e2e_s),
            },
        }

    def _why(self, entry: Entry) -> str:
        """Why it went where it went, and if two replicas serve it, both."""
        why, weighed = self._why_there(entry), entry.weighed
        if entry.decision.prefill_id is None or weighed is None or weighed.second is None:
            return why
        of, able = len(weighed.second.job.rows), _count(weighed.second.promises)
        able_words = "" if able is None else f", of which {able} can promise its part"
        return f"{why} Its prompt is computed there, and one of {of} others goes on{able_words}."

    def _why_there(self, entry: Entry) -> str:
        decision, weighed = entry.decision, entry.weighed
        if decision.reason == NO_REPLICA or weighed is None:
            return "No replica may be chosen: none has reported lately, or all are drained."
        able = _able(weighed)
        of_all = f"{len(weighed.job.rows)} replicas"
        of = f"{able} of {of_all}"
        if _is_trial(decision, weighed):
            return f"It tries a replica that was in quarantine and could serve it: one of {of_all}."
        cannot = f"No replica can promise the objective{_bound(weighed)}"
        if decision.reason == UNATTAINABLE:
            first = _OVER_SHARE if decision.over_share else cannot
            return f"{first}, and the class is not served without."
        if decision.tier is None:
            return f"Nothing is promised here, as admission is off; {self._routing.name} chose."
        if decision.tier is Tier.GUARANTEED:
            promised = f"{of} can promise the objective; of those {self._routing.name} chose."
            return f"{_moved(entry.query.moves_from)}{promised}"
        if able is None:
            states = entry.query.slo.stated
            asks = "It asks for best effort, as the lines of a batch do"
            first = asks if states else "It states no objective to promise"
        elif decision.over_share:
            first = _OVER_SHARE
        elif able:
            first = "No replica that is well has reported lately, so nothing is promised"
        else:
            first = cannot
        return f"{first}: served as best effort, where least work is ahead."

    def _compare(
        self, told: dict[str, Any], decision: RouteDecision, weighed: DecisionInputs
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
        told["others"] = [
            _figures(weighed, names, place) | {"why_not": self._why_not(decision, weighed, place)}
            for place in places
        ]
        told["others_left_out"] = count - len(places) - (chosen is not None)
        if chosen is not None:
            told["chosen"] = _figures(weighed, names, chosen)

    def _second(self, weighed: DecisionInputs, second: DecodeChoice) -> dict[str, Any]:
        """Who would go on if one of the replicas computes the prompt only, and the best of the
        others, each with its figures."""
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
            "handover_ms": _ms(second.handover_s),
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


def _not_guaranteed(entry: Entry) -> str | None:
    """Why nothing was guaranteed, as a word for programs; ``None`` where it was. Of constraints,
    the one that binds at the replica that could soonest."""
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
    """At how many replicas each constraint forbade a promise."""
    if weighed is None or weighed.promises is None:
        return {}
    promises = weighed.promises
    found = Counter(promises.binds[~promises.holds].tolist())
    return {Constraint(bound).name.lower(): count for bound, count in found.most_common()}


def _bound(weighed: DecisionInputs) -> str:
    """What forbade it, in brackets: of one constraint its name, of several at how many replicas."""
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
    """Whether the request goes to a replica in quarantine, to see what becomes of it."""
    tried = {weighed.ids[row] for row in weighed.untried}
    return bool(tried & {decision.replica_id, decision.prefill_id})


def _moved(replica_id: str) -> str:
    """Why a request was decided on that a replica had already."""
    return f"Its first token was going to be late at {replica_id}. " if replica_id else ""


def _able(weighed: DecisionInputs | None) -> int | None:
    return None if weighed is None else _count(weighed.promises)


def _count(promises: Promises | None) -> int | None:
    """How many can promise; ``None`` where nothing was asked."""
    return None if promises is None else int(promises.holds.sum())


def _figures(weighed: DecisionInputs, names: list[str], place: int) -> dict[str, Any]:
    """What was known of the replica at a place."""
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
