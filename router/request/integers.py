"""Integers as JSON Schema has them: a number without a fraction, also if it is written ``16.0``."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BeforeValidator


def as_integer(value: Any) -> Any:
    """``value``, as an ``int`` if it is a float without a fraction."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER: Final = BeforeValidator(as_integer)
"""Annotates an ``int`` field of a strict model."""
