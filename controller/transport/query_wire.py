"""Queries and decisions as JSON, for the controller's plain connection."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sluice.controller.messages import RouteDecision, RouteQuery, Tier
from sluice.scheduling.objective import SLO
from sluice.scheduling.stages import Stage

_objective = lru_cache(maxsize=1024, typed=True)(SLO)
"""Most requests have the objective of their class, and checking one takes as long as the rest."""

_tier = {tier.value: tier for tier in Tier}.__getitem__


def to_row(query: RouteQuery) -> tuple[object, ...]:
    """The query as a row; :func:`of_row` is the inverse."""
    slo = query.slo
    return (
        query.key,
        query.prompt_tokens,
        query.waited_s,
        (*query.tiers,),
        query.output_tokens,
        query.session,
        query.prefix,
        query.request_id,
        query.prefill_key,
        query.avoid,
        query.tenant,
        query.weight,
        query.client_request_id,
        query.moves_from,
        slo.ttft_s,
        slo.tpot_s,
        slo.e2e_s,
        slo.priority,
        slo.service_class,
        slo.tpot_anchor,
        slo.stages,
    )


def of_row(row: Any) -> RouteQuery:
    """The query in a row.

    Raises:
        KeyError, TypeError, ValueError: the row is malformed.
    """
    (key, prompt_tokens, waited_s, tiers, output_tokens, session, prefix, request_id, prefill_key,
     avoid, tenant, weight, client_request_id, moves_from, *objective, stages) = row  # fmt: skip
    return RouteQuery(
        key,
        _objective(*objective, tuple([Stage(*stage) for stage in stages])),
        prompt_tokens,
        waited_s,
        frozenset(map(_tier, tiers)),
        output_tokens,
        session,
        tuple(prefix),
        request_id,
        prefill_key,
        tuple(avoid),
        tenant,
        weight,
        client_request_id,
        moves_from,
    )


def decisions(rows: Any) -> tuple[RouteDecision, ...]:
    """The decisions in ``rows``: named tuples are lists in JSON."""
    return tuple([_decision(row) for row in rows])


def _decision(row: Any) -> RouteDecision:
    replica_id, reason, tier, *rest = row
    return RouteDecision(replica_id, reason, None if tier is None else _tier(tier), *rest)
