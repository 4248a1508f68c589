"""OpenAI's ``expires_after``: how long a file is kept, from when it was made."""

from __future__ import annotations

from typing import Any

from sluice.router.config import DAY_S, HOUR_S
from sluice.router.errors import invalid, shown
from sluice.router.request.validation import as_integer

MIN_S = HOUR_S
MAX_S = 30 * DAY_S


def expiry_s(name: str, anchor: Any, seconds: Any) -> int:
    """Seconds that ``name`` asks for.

    Raises:
        ApiError: 400.
    """
    if anchor != "created_at":
        raise invalid(f"{name}.anchor must be created_at, got {shown(anchor)}", f"{name}.anchor")
    seconds = as_integer(seconds)
    if type(seconds) is not int or not MIN_S <= seconds <= MAX_S:
        raise invalid(
            f"{name}.seconds must be an integer from {MIN_S} to {MAX_S}, got {shown(seconds)}",
            f"{name}.seconds",
        )
    return int(seconds)
