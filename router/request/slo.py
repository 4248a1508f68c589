"""The SLO of a request, from the client's statements, its service class and its key's limits.

Precedence by field: body ``slo``, ``x-slo-*`` headers, their second names, Dynamo's ``nvext``,
class. Of the class: ``slo.class``, ``x-slo-class``, second names, ``service_tier``, default.
Stages and loops come only from bodies; stages replace other TTFT and TPOT. Overridden values are
checked, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from sluice.protocol.requests import ANTHROPIC, Endpoint
from sluice.router import wire
from sluice.router.config import RouterConfig
from sluice.router.errors import invalid, shown
from sluice.router.request.loop import ALLOWED_MS, DEADLINE_FIELD, StatedLoop, read_loop
from sluice.router.request.validation import INTEGER, validated
from sluice.router.tenancy.limits import NO_CAPS, LimitCheck, Milliseconds, TenantLimits
from sluice.router.wire import LOOP_DEADLINE
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


class _Tokens(BaseModel, strict=True, extra="forbid", frozen=True):
    tokens: Annotated[int, Field(ge=1, le=MAX_STAGE_TOKENS), INTEGER]


class StatedStage(BaseModel, strict=True, extra="forbid", frozen=True):
    """One stage as a client states it."""

    until: Literal["reasoning_end", "end"] | _Tokens
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None

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
    allowed = {"until": _ALLOWED_UNTIL}
    return validated(
        StatedStage, value, f"{name}.{{}}".format, lambda key: allowed.get(key, ALLOWED_MS), FIELD
    )


# As many digits as floats of that range are printed with, so that clients may send any such value.
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,20})?")
_INTEGER = re.compile(r"[0-9]{1,12}")
_ALLOWED = {
    wire.TTFT: ALLOWED_MS,
    wire.TPOT: ALLOWED_MS,
    wire.E2E: ALLOWED_MS,
    wire.PRIORITY: f"an integer from {MIN_PRIORITY} to {MAX_PRIORITY}",
}

_MAX_HINT = 1 << 31
_ALLOWED_HINTS = _ALLOWED | {
    wire.PRIORITY: f"an integer from {-_MAX_HINT} to {_MAX_HINT - 1}",
    wire.EXPECTED: f"an integer from 1 to {wire.MAX_TOKENS}",
}

MIN_TPS, MAX_TPS = 0.001, 1_000_000
SMG_TIERS = {"system": "priority", "interactive": "priority", "default": "default", "bulk": "flex"}
"""By class of the SGLang Model Gateway, the service tier that selects the class here."""


class _Stated(BaseModel, strict=True, extra="forbid", frozen=True):
    """What one source (body, or set of headers) states. Strict: no string for a number."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY), INTEGER] | None = None
    service_class: str | None = Field(default=None, alias=wire.CLASS)


class _Hints(BaseModel, strict=True, extra="forbid", frozen=True):
    """What Dynamo's ``nvext`` states, by the names of :data:`~sluice.router.wire.NVEXT`."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Annotated[int, Field(ge=-_MAX_HINT, lt=_MAX_HINT), INTEGER] | None = None
    expected_tokens: Annotated[int, Field(ge=1, le=wire.MAX_TOKENS), INTEGER] | None = None


OPENAI_TIERS = ("auto", "default", "flex", "priority", "scale")
STANDARD_ONLY = "standard_only"
"""Anthropic's name of the tier that OpenAI calls ``default``."""

ANTHROPIC_TIERS = ("auto", STANDARD_ONLY)

TPS_HEADER, SMG_HEADER = wire.SGL_HEADERS[wire.TPOT], wire.SMG_HEADERS[wire.CLASS]
_HEADER_FIELDS = {
    name: (source, field)
    for source, names in enumerate(wire.SLO_HEADER_SETS)
    for field, name in names.items()
}
_SLO_HEADERS = frozenset(name.encode() for name in _HEADER_FIELDS)
_SLO_PREFIX = wire.SLO_HEADER_PREFIX.encode()

_BODY_NAMES = {key: f"{wire.SLO_FIELD}.{key}" for key in wire.SLO_HEADERS}
_BODY_KEYS = (*wire.SLO_HEADERS, wire.STAGES, wire.LOOP)

_Source = tuple[_Stated, Mapping[str, str]]
"""What one source states, and the client's names of the fields."""


class Objective(NamedTuple):
    """A request's SLO, what its key's limits changed, its loop, whose deadline is not in it, and
    the output tokens that its client expects, 0 if it does not say."""

    slo: SLO
    clamped: Mapping[str, str]
    loop: StatedLoop | None = None
    expected_tokens: int = 0


def _first(sources: Iterable[_Source], field: str) -> tuple[Any, str | None]:
    """The first source's value of ``field``, and the client's name for it; both may be ``None``."""
    attribute = "service_class" if field == wire.CLASS else field
    for source, names in sources:
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
        self._allowed = {**_ALLOWED, wire.CLASS: f"one of {_names(self._classes)}"}
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
        sources: list[_Source] = []
        stages: tuple[StatedStage, ...] = ()
        loop, expected_tokens = None, 0
        if (own := body.get(wire.SLO_FIELD)) is not None:
            stated, stages, loop = self._stated(own)
            sources.append((stated, _BODY_NAMES))
        self._from_headers(headers, sources)
        tier_class = None
        if (tier := body.get(wire.SERVICE_TIER_FIELD)) is not None:
            tier_class = self._of_tier(tier, endpoint)
        if (nvext := body.get(wire.NVEXT_FIELD)) is not None:
            hinted, expected_tokens = _read_hints(nvext)
            sources.append((hinted, wire.NVEXT))
        if not sources and caps is NO_CAPS:
            return self._presets[tier_class or self._default_class]
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
            loop = loop.model_copy(update={"deadline_ms": deadline_ms})
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
            return Objective(slo, limit_check.clamped, loop, expected_tokens)
        slo = SLO(
            ttft_s=seconds(wire.TTFT, defaults.ttft_ms),
            tpot_s=seconds(wire.TPOT, defaults.tpot_ms),
            e2e_s=seconds(wire.E2E, defaults.e2e_ms),
            priority=priority,
            service_class=class_name,
            tpot_anchor=defaults.tpot_anchor,
        )
        return Objective(slo, limit_check.clamped, loop, expected_tokens)

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

    def _from_headers(self, headers: Iterable[tuple[bytes, bytes]], sources: list[_Source]) -> None:
        """Add what each of :data:`~sluice.router.wire.SLO_HEADER_SETS` states, in one pass."""
        found: dict[int, dict[str, Any]] = {}
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
            values = found.setdefault(source, {})
            if field in values:
                raise invalid(f"{name} must be given once, got it several times", name)
            text = raw_value.decode("latin-1")
            values[field] = self._of_smg(text) if name == SMG_HEADER else _parsed(field, name, text)
        for source in sorted(found):
            names = wire.SLO_HEADER_SETS[source]
            sources.append((self._checked(found[source], names), names))

    def _of_smg(self, text: str) -> str | None:
        """The class by the SGLang Model Gateway's header; ``None``: the default one."""
        given = text.strip().lower()
        if given not in SMG_TIERS:
            raise invalid(
                f"{SMG_HEADER} must be one of {_names(SMG_TIERS)}, got {shown(text)}", SMG_HEADER
            )
        return self._class_of_tier.get(SMG_TIERS[given])

    def _checked(self, values: dict[str, Any], names: Mapping[str, str]) -> _Stated:
        """``values`` by field, validated; ``names`` are the client's names of the fields."""
        stated = validated(_Stated, values, names.__getitem__, self._allowed.__getitem__)
        class_name = stated.service_class
        if class_name is not None and class_name not in self._classes:
            name = names[wire.CLASS]
            raise invalid(
                f"{name} must be {self._allowed[wire.CLASS]}, got {shown(class_name)}", name
            )
        return stated

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
    if name == TPS_HEADER:
        per_s = float(text) if _NUMBER.fullmatch(text) else 0.0
        if MIN_TPS <= per_s <= MAX_TPS:
            return 1000 / per_s
        raise invalid(
            f"{name} must be a number of tokens per second from {MIN_TPS:g} to {MAX_TPS}, "
            f"got {shown(text)}",
            name,
        )
    if field == wire.PRIORITY and _INTEGER.fullmatch(text):
        return int(text)
    if field != wire.PRIORITY and _NUMBER.fullmatch(text):
        return float(text)
    raise invalid(f"{name} must be {_ALLOWED[field]}, got {shown(text)}", name)


def _read_hints(nvext: Any) -> tuple[_Stated, int]:
    """The objective in ``nvext``, and its expected output tokens, 0 if none are stated. The rest of
    it is Dynamo's own. Raises ApiError: 400."""
    given = {}
    for key, name in wire.NVEXT.items():
        _, outer, inner = name.split(".")
        part = nvext.get(outer) if isinstance(nvext, dict) else nvext
        if not isinstance(part, dict | None) or not isinstance(nvext, dict):
            wrong = wire.NVEXT_FIELD if part is nvext else f"{wire.NVEXT_FIELD}.{outer}"
            raise invalid(f"{wrong} must be an object, got {shown(part)}", wrong)
        if part is not None and part.get(inner) is not None:
            given[key] = part[inner]
    hints = validated(_Hints, given, wire.NVEXT.__getitem__, _ALLOWED_HINTS.__getitem__)
    priority = hints.priority
    if priority is not None:
        priority = min(max(priority, MIN_PRIORITY), MAX_PRIORITY)
    stated = _Stated(ttft_ms=hints.ttft_ms, tpot_ms=hints.tpot_ms, priority=priority)
    return stated, hints.expected_tokens or 0


def hint_schemas() -> dict[str, Any]:
    """JSON schemas of the objects in ``nvext`` that are read."""
    properties = _Hints.model_json_schema()["properties"]
    objects: dict[str, Any] = {}
    for key, name in wire.NVEXT.items():
        _, outer, inner = name.split(".")
        object_ = objects.setdefault(outer, {"type": ["object", "null"], "properties": {}})
        object_["properties"][inner] = {"anyOf": properties[key]["anyOf"]}
    return objects


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
