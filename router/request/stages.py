"""The stages in a body's ``slo``: ``[{"until": "reasoning_end", "ttft_ms": 500}, ...]``.

``until`` states where a stage ends: ``{"tokens": N}`` after N tokens of its own,
``"reasoning_end"`` with the reasoning, ``"end"`` with the request, for the last stage only.

A client states no prompt tokens of a later stage, as a request of the OpenAI API has one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sluice.router import wire
from sluice.router.errors import ApiError, invalid, shown
from sluice.router.request.integers import INTEGER
from sluice.router.wire import MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from sluice.scheduling.request.stages import MOST_STAGE_TOKENS, MOST_STAGES, Stage

Hold = Callable[[str, float | None, str], float | None]
"""Applies the client's limits to an objective, ms. Takes its field, its value and the client's name
for it."""

FIELD = f"{wire.SLO_FIELD}.{wire.STAGES}"

_ALLOWED_UNTIL = (
    f'"reasoning_end", "end", or {{"tokens": N}} with an integer N from 1 to {MOST_STAGE_TOKENS}'
)
_ALLOWED_MS = f"a number of milliseconds from {MIN_OBJECTIVE_MS:g} to {MAX_OBJECTIVE_MS:.0f}"
_Milliseconds = Annotated[
    float | None, Field(ge=MIN_OBJECTIVE_MS, le=MAX_OBJECTIVE_MS, allow_inf_nan=False)
]


class _Tokens(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tokens: Annotated[int, Field(ge=1, le=MOST_STAGE_TOKENS), INTEGER]


class StatedStage(BaseModel):
    """One stage as a client states it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    until: Literal["reasoning_end", "end"] | _Tokens
    ttft_ms: _Milliseconds = None
    tpot_ms: _Milliseconds = None
    e2e_ms: _Milliseconds = None

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
    """The stages in ``value``; none if that is ``None``.

    Raises:
        ApiError: 400; the message names the error and the allowed values.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_STAGES:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise invalid(f"{FIELD} must be a list of 1 to {MOST_STAGES} stages, got {got}", FIELD)
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
