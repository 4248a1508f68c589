"""The SLO of a request, from the client's statements, its service class and its key's limits.

Precedence by field: body ``slo``, ``x-slo-*`` headers, their second names, class. Of the class:
``slo.class``, ``x-slo-class``, second names, ``service_tier``, default. Stages and loops come only
from bodies; stages replace other TTFT and TPOT. Overridden values are checked, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sluice.protocol.requests import ANTHROPIC, Endpoint
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.errors import ApiError, invalid, shown
from sluice.router.request.loop import DEADLINE_FIELD, StatedLoop, read_loop
from sluice.router.request.validation import INTEGER
from sluice.router.tenancy.limits import NO_CAPS, LimitCheck, TenantLimits
from sluice.router.wire import LOOP_DEADLINE, MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY, SLO
from sluice.scheduling.request.stages import MAX_STAGE_TOKENS, MAX_STAGES, Stage

# The stages in a body's ``slo``: ``[{"until": "reasoning_end", "ttft_ms": 500}, ...]``.
#
# ``until`` states where a stage ends: ``{"tokens": N}`` after N tokens of its own,
# ``"reasoning_end"`` with the reasoning, ``"end"`` with the request, for the last stage only.
#
# A client states no prompt tokens of a later stage, as a request of the OpenAI API has one prompt.

Hold = Callable[[str, float | None, str], float | None]
"""Applies a client's limits to a field's value, ms, and the client's name for it."""

FIELD = f"{wire.SLO_FIELD}.{wire.STAGES}"

_ALLOWED_UNTIL = (
    f'"reasoning_end", "end", or {{"tokens": N}} with an integer N from 1 to {MAX_STAGE_TOKENS}'
)
_StageMilliseconds = Annotated[
    float | None, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)
]


class _Tokens(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tokens: Annotated[int, Field(ge=1, le=MAX_STAGE_TOKENS), INTEGER]


class StatedStage(BaseModel):
    """One stage as a client states it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    until: Literal["reasoning_end", "end"] | _Tokens
    ttft_ms: _StageMilliseconds = None
    tpot_ms: _StageMilliseconds = None
    e2e_ms: _StageMilliseconds = None

    def stage(self, name: str, hold: Hold) -> Stage:
        """The stage within its client's limits; ``name`` is the client's name for it."""

        def seconds(field: str, stated_ms: float | None) -> float | None:
            value_ms = hold(field, stated_ms, f"{name}.{field}")
            return None if value_ms is None else value_ms / 1000

        return Stage(
            seconds(wire.TTFT, self.ttft_ms),
            seconds(wire.TPOT, self.tpot_ms),
            seconds(wire.E2E, self.e2e_ms),
            self.until.tokens if isinstance(self.until, _Tokens) else 0,
        )


def read_stages(value: Any) -> tuple[StatedStage, ...]:
    """The stages in ``value``; none if that is ``None``. Raises ApiError: 400."""
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_STAGES:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise invalid(f"{FIELD} must be a list of 1 to {MAX_STAGES} stages, got {got}", FIELD)
    stages = tuple([_read(f"{FIELD}[{place}]", each) for place, each in enumerate(value)])
    ends = [stage.until for stage in stages]
    if ends[-1] != "end" or "end" in ends[:-1]:
        raise invalid(f'{FIELD} must have the until "end" in its last stage, and only there', FIELD)
    if ends.count("reasoning_end") > 1:
        raise invalid(f'{FIELD} may have the until "reasoning_end" only once', FIELD)
    return stages


def _read(name: str, value: Any) -> StatedStage:
    fields = StatedStage.model_fields
    if not isinstance(value, dict):
        raise invalid(
            f"{name} must be an object with until and any of ttft_ms, tpot_ms, e2e_ms, "
            f"got {shown(value)}",
            FIELD,
        )
    # Stops at the first unknown key, however many there are.
    unknown = next((key for key in value if key not in fields), None)
    if unknown is not None:
        raise invalid(
            f"{name} has the unknown key {shown(unknown)}; allowed: {', '.join(fields)}", FIELD
        )
    try:
        return StatedStage.model_validate(value)
    except ValidationError as error:
        raise _refusal(name, value, error) from None


def _refusal(name: str, value: dict[str, Any], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(first["loc"][0])
    allowed = _ALLOWED_UNTIL if field == "until" else _ALLOWED_MS
    got = shown(value[field]) if field in value else "nothing"
    return invalid(f"{name}.{field} must be {allowed}, got {got}", FIELD)


# As many digits as floats of that range are printed with, so that clients may send any such value.
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,20})?")
_INTEGER = re.compile(r"[0-9]{1,12}")
_ALLOWED_MS = f"a number of milliseconds from {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:.0f}"
_ALLOWED = {
    wire.TTFT: _ALLOWED_MS,
    wire.TPOT: _ALLOWED_MS,
    wire.E2E: _ALLOWED_MS,
    wire.PRIORITY: f"an integer from {MIN_PRIORITY} to {MAX_PRIORITY}",
}

_Milliseconds = Annotated[
    float, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)
]


class _Stated(BaseModel):
    """What one source (body, or set of headers) states. Strict: no string for a number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ttft_ms: _Milliseconds | None = None
    tpot_ms: _Milliseconds | None = None
    e2e_ms: _Milliseconds | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY), INTEGER] | None = None
    service_class: str | None = Field(default=None, alias=wire.CLASS)


OPENAI_TIERS = ("auto", "default", "flex", "priority", "scale")
STANDARD_ONLY = "standard_only"
"""Anthropic's name of the tier that OpenAI calls ``default``."""

ANTHROPIC_TIERS = ("auto", STANDARD_ONLY)

_NOTHING = _Stated()
_HEADER_FIELDS = {
    name: (source, field)
    for source, names in enumerate(wire.SLO_HEADER_SETS)
    for field, name in names.items()
}
_SLO_HEADERS = frozenset(name.encode() for name in _HEADER_FIELDS)
_SLO_PREFIX = wire.SLO_HEADER_PREFIX.encode()
_NO_HEADERS = (_NOTHING,) * len(wire.SLO_HEADER_SETS)

_BODY_NAMES = {key: f"{wire.SLO_FIELD}.{key}" for key in wire.SLO_HEADERS}
_BODY_KEYS = (*wire.SLO_HEADERS, wire.STAGES, wire.LOOP)
_SOURCE_NAMES = (_BODY_NAMES, *wire.SLO_HEADER_SETS)


class Objective(NamedTuple):
    """A request's SLO, what its key's limits changed, and its loop, whose deadline is not in it."""

    slo: SLO
    clamped: Mapping[str, str]
    loop: StatedLoop | None = None


def _first(sources: Iterable[_Stated], field: str) -> tuple[Any, str | None]:
    """The first source's value of ``field``, and the client's name for it; both may be ``None``."""
    attribute = "service_class" if field == wire.CLASS else field
    for source, names in zip(sources, _SOURCE_NAMES, strict=True):
        value = getattr(source, attribute)
        if value is not None:
            return value, names[field]
    return None, None


class SloReader:
    """Reads SLOs, with the service classes of one configuration."""

    def __init__(self, config: RouterConfig) -> None:
        self._classes = config.classes
        self._default_class = config.default_class
        self._class_of_tier = {
            tier: name for name, entry in config.classes.items() for tier in entry.service_tiers
        }
        # Of requests that state nothing.
        self._presets = {
            name: self.read({wire.SLO_FIELD: {wire.CLASS: name}}, ()) for name in self._classes
        }

    def read(
        self,
        body: Mapping[str, Any],
        headers: Iterable[tuple[bytes, bytes]],
        caps: TenantLimits = NO_CAPS,
        endpoint: Endpoint = "chat",
    ) -> Objective:
        """The SLO by this body and these raw headers (lower-case names). Raises ApiError: 400; 403,
        the request states more than ``caps`` allow, and these refuse that."""
        stated, loop = _NOTHING, None
        stages: tuple[StatedStage, ...] = ()
        if (own := body.get(wire.SLO_FIELD)) is not None:
            stated, stages, loop = self._stated(own)
        in_headers = self._from_headers(headers)
        tier_class = None
        if (tier := body.get(wire.SERVICE_TIER_FIELD)) is not None:
            tier_class = self._of_tier(tier, endpoint)
        if own is None and in_headers is _NO_HEADERS and caps is NO_CAPS:
            return self._presets[tier_class or self._default_class]
        sources = (stated, *in_headers)
        class_name, said_in = _first(sources, wire.CLASS)
        if class_name is None and tier_class is not None:
            class_name, said_in = tier_class, wire.SERVICE_TIER_FIELD
        limit_check = LimitCheck(caps)
        class_name = limit_check.service_class(class_name or self._default_class, said_in)
        defaults = self._classes[class_name]
        priority, said_in = _first(sources, wire.PRIORITY)
        priority = limit_check.priority(priority or defaults.priority, said_in)

        def seconds(field: str, preset_ms: float | None) -> float | None:
            value_ms, said_in = _first(sources, field)
            value_ms = limit_check.objective_ms(
                field, preset_ms if value_ms is None else value_ms, said_in
            )
            return None if value_ms is None else value_ms / 1000

        if loop is not None:
            deadline_ms = limit_check.objective_ms(LOOP_DEADLINE, loop.deadline_ms, DEADLINE_FIELD)
            assert deadline_ms is not None
            loop = loop._replace(deadline_ms=deadline_ms)
        if stages:
            slo = SLO.of_stages(
                [
                    stage.stage(f"{FIELD}[{place}]", limit_check.objective_ms)
                    for place, stage in enumerate(stages)
                ],
                seconds(wire.E2E, defaults.e2e_ms),
                priority,
                class_name,
                defaults.tpot_anchor,
            )
            return Objective(slo, limit_check.clamped, loop)
        slo = SLO(
            ttft_s=seconds(wire.TTFT, defaults.ttft_ms),
            tpot_s=seconds(wire.TPOT, defaults.tpot_ms),
            e2e_s=seconds(wire.E2E, defaults.e2e_ms),
            priority=priority,
            service_class=class_name,
            tpot_anchor=defaults.tpot_anchor,
        )
        return Objective(slo, limit_check.clamped, loop)

    def tier_of(self, service_class: str) -> str | None:
        """A class's first OpenAI tier except ``auto``, which stands for the server's choice."""
        tiers = self._classes[service_class].service_tiers
        return next((tier for tier in tiers if tier != "auto"), None)

    def _stated(self, value: Any) -> tuple[_Stated, tuple[StatedStage, ...], StatedLoop | None]:
        if not isinstance(value, dict):
            raise invalid(
                f"{wire.SLO_FIELD} must be an object with any of {_names(_BODY_KEYS)}, "
                f"got {shown(value)}",
                wire.SLO_FIELD,
            )
        # Stops at the first unknown key, however many there are.
        for key in value:
            if key not in _BODY_KEYS:
                raise invalid(
                    f"{wire.SLO_FIELD} has the unknown key {shown(key)}; allowed: "
                    f"{_names(_BODY_KEYS)}",
                    wire.SLO_FIELD,
                )
        stages = read_stages(value.get(wire.STAGES))
        for key in (wire.TTFT, wire.TPOT) if stages else ():
            if value.get(key) is not None:
                raise invalid(
                    f"{_BODY_NAMES[key]} and {FIELD} contradict each other; state {key} in "
                    "the stages",
                    _BODY_NAMES[key],
                )
        rest = {key: each for key, each in value.items() if key in wire.SLO_HEADERS}
        return self._checked(rest, _BODY_NAMES), stages, read_loop(value.get(wire.LOOP))

    def _from_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterable[_Stated]:
        """The values of each of :data:`~sluice.router.wire.SLO_HEADER_SETS`, in one pass."""
        found: tuple[dict[str, Any], ...] = ({}, {}, {})
        for raw_name, raw_value in headers:
            if raw_name not in _SLO_HEADERS and not raw_name.startswith(_SLO_PREFIX):
                continue
            name = raw_name.decode("latin-1")
            known = _HEADER_FIELDS.get(name)
            if known is None:
                raise invalid(
                    f"{shown(name)} is not a known header; allowed: "
                    f"{_names(wire.SLO_HEADERS.values())}",
                    name[:64],
                )
            source, field = known
            if field in found[source]:
                raise invalid(f"{name} must be given once, got it several times", name)
            found[source][field] = _parsed(field, name, raw_value.decode("latin-1"))
        if not any(found):
            return _NO_HEADERS
        return [self._checked(*each) for each in zip(found, wire.SLO_HEADER_SETS, strict=True)]

    def _checked(self, values: dict[str, Any], names: Mapping[str, str]) -> _Stated:
        """``values`` by field, validated; ``names`` are the client's names of the fields."""
        try:
            stated = _Stated.model_validate(values)
        except ValidationError as error:
            raise self._refusal(error, values, names) from None
        class_name = stated.service_class
        if class_name is not None and class_name not in self._classes:
            raise invalid(self._class_message(names[wire.CLASS], class_name), names[wire.CLASS])
        return stated

    def _refusal(
        self, error: ValidationError, values: dict[str, Any], names: Mapping[str, str]
    ) -> ApiError:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])
        if field == wire.CLASS:
            return invalid(self._class_message(names[field], values[field]), names[field])
        return invalid(
            f"{names[field]} must be {_ALLOWED[field]}, got {shown(values[field])}", names[field]
        )

    def _class_message(self, name: str, value: object) -> str:
        return f"{name} must be one of {_names(self._classes)}, got {shown(value)}"

    def tiers(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Service tiers a request may name. One without a class selects the default class."""
        if endpoint in ANTHROPIC:
            return ANTHROPIC_TIERS
        return tuple(dict.fromkeys((*OPENAI_TIERS, *self._class_of_tier)))

    def _of_tier(self, tier: Any, endpoint: Endpoint) -> str | None:
        if not isinstance(tier, str) or tier not in self.tiers(endpoint):
            raise invalid(
                f"{wire.SERVICE_TIER_FIELD} must be one of {_names(self.tiers(endpoint))}, "
                f"got {shown(tier)}",
                wire.SERVICE_TIER_FIELD,
            )
        return self._class_of_tier.get("default" if tier == STANDARD_ONLY else tier)


def _parsed(field: str, name: str, text: str) -> object:
    """The value of a header as its JSON type. Only plain decimal numbers are accepted."""
    if field == wire.CLASS:
        return text
    if field == wire.PRIORITY and _INTEGER.fullmatch(text):
        return int(text)
    if field != wire.PRIORITY and _NUMBER.fullmatch(text):
        return float(text)
    raise invalid(f"{name} must be {_ALLOWED[field]}, got {shown(text)}", name)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
