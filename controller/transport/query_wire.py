"""Queries as MessagePack, with the bounds of their fields."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from sluice.protocol.messages import MAX_TOKENS, Age, Id, Key, Text
from sluice.scheduling.fleet.prefix import MAX_CHUNKS
from sluice.scheduling.request.job import RouteQuery, Tier
from sluice.scheduling.request.objective import SLO, TPOTAnchor
from sluice.scheduling.request.stages import MOST_STAGES, Stage
from sluice.scheduling.tenancy.fair_shares import MAX_WEIGHT

MAX_AVOIDED: Final = 64
"""Most replicas that have failed one request."""

MAX_ONLY: Final = 4_096
"""Most replicas that one request is restricted to."""

_MAX_OBJECTIVE_BYTES: Final = 4_096

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class QueryRow(NamedTuple):
    """The fields of a :class:`RouteQuery`, in its order; ``slo`` as its own message."""

    key: Key
    slo: Annotated[bytes, Meta(max_length=_MAX_OBJECTIVE_BYTES)]
    prompt_tokens: Tokens
    waited_s: Age
    tiers: Annotated[frozenset[Tier], Meta(min_length=1)]
    output_tokens: Tokens
    session: Key
    prefix: Annotated[tuple[Key, ...], Meta(max_length=MAX_CHUNKS)]
    request_id: Text
    prefill_key: Key
    avoid: Annotated[tuple[Id, ...], Meta(max_length=MAX_AVOIDED)]
    tenant: Key
    weight: Annotated[float, Meta(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)]
    client_request_id: Text
    moves_from: Text
    brings_kv: bool
    elsewhere: bool
    only: Annotated[tuple[Id, ...], Meta(max_length=MAX_ONLY)]


class ObjectiveRow(NamedTuple):
    """The arguments of an :class:`SLO`, which checks their values."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    priority: int
    service_class: Id
    tpot_anchor: TPOTAnchor
    stages: Annotated[tuple[Stage, ...], Meta(max_length=MOST_STAGES)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QueryRow).decode
_decode_objective = msgspec.msgpack.Decoder(ObjectiveRow).decode


def encode(query: RouteQuery) -> bytes:
    """The query's bytes; :func:`decode` is the inverse."""
    slo = query.slo
    objective = (*slo.times_s, slo.priority, slo.service_class, slo.tpot_anchor, slo.stages)
    return _encode((query.key, _encode(objective), *query[2:]))


def decode(data: bytes | msgspec.Raw) -> RouteQuery:
    """The query in the bytes.

    Raises:
        ValueError: it is malformed, or a field is out of range.
    """
    row = _decode(data)
    query = RouteQuery._make((row.key, _objective(row.slo), *row[2:]))
    if query.prefill_key and query.prefill_key == query.key:
        raise ValueError("prefill_key must differ from key")
    if query.brings_kv and not query.moves_from:
        raise ValueError("brings_kv needs the replica that has the KV, moves_from")
    return query


@lru_cache(maxsize=1024)
def _objective(data: bytes) -> SLO:
    """Most requests have the objective of their class, and checking one takes as long as the
    rest."""
    return SLO(*_decode_objective(data))
