"""A fitted step-time model as stored in a file and sent to the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sluice.scheduling.latency.model import FAMILIES, LatencyModel, LinearLatency


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fitted model explains its samples.

    ``mape`` and ``p90_error`` are the mean and the 90th percentile of
    ``|predicted - real| / real``; ``r2`` is of the seconds; ``dropped`` counts outliers left out
    of the fit and of all three. ``held_out`` is the mean error on steps that a fit had not seen,
    ``held_out_without_context`` that of ``a + b * new tokens``, both without the worst steps;
    ``None``: not measured (:mod:`sluice.scheduling.latency.choice`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    samples: int
    dropped: int
    mape: float
    p90_error: float
    r2: float
    held_out: float | None = None
    held_out_without_context: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """A fitted model with what it was fitted on, as stored in a JSON file.

    ``key`` names model, engine version and hardware; a profile serves only the key it was made for.
    ``family`` and ``coefficients`` are those of a :class:`LatencyModel`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    family: str
    coefficients: tuple[float, ...]
    report: FitReport | None = None

    @property
    def model(self) -> LatencyModel:
        """The model, uncorrected and without head-room.

        Raises:
            ValueError: there is no such family, or a coefficient is impossible.
        """
        if self.family not in FAMILIES:
            raise ValueError(
                f"unknown family {self.family!r}; known: {', '.join(sorted(FAMILIES))}"
            )
        return FAMILIES[self.family].of(self.coefficients)

    @classmethod
    def of(cls, key: str, model: LatencyModel, report: FitReport | None = None) -> LatencyProfile:
        """The profile of a fitted ``model``; its correction and its head-room are not stored."""
        return cls(key, model.family, model.coefficients, report)

    def to_json(self) -> str:
        """JSON text, readable by :meth:`from_json`."""
        return TypeAdapter(LatencyProfile).dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> LatencyProfile:
        """Parse a profile, also one from before there were families: linear, each coefficient in a
        field of its own.

        Raises:
            ValueError: not JSON, a missing, unknown or mistyped field, or an impossible
                coefficient; the text says which.
        """
        try:
            fields = TypeAdapter(Any).validate_json(text)
            named = isinstance(fields, dict) and "family" not in fields and "a" in fields
            stored: type[Any] = _NamedLinear if named else cls
            profile: LatencyProfile | _NamedLinear = TypeAdapter(stored).validate_json(text)
            if isinstance(profile, _NamedLinear):
                profile = profile.profile
            _ = profile.model
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, part['loc'])) or 'text'}: {part['msg']}"
                for part in error.errors(include_url=False)
            )
            raise ValueError(f"not a latency profile: {details}") from error
        except ValueError as error:
            raise ValueError(f"not a latency profile: {error}") from error
        return profile


@dataclass(frozen=True, slots=True)
class _NamedLinear:
    """The stored form from before there were families."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key: str
    a: float
    b: float
    c: float
    d: float
    report: FitReport | None = None

    @property
    def profile(self) -> LatencyProfile:
        coefficients = (self.a, self.b, self.c, self.d)
        return LatencyProfile(self.key, LinearLatency.family, coefficients, self.report)
