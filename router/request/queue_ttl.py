"""The longest wait in an admission queue that a client accepts, in the llm-d router's header.

That router reads it as a bound on the wait in its own queue before a request is sent to a replica,
which can only shorten the configured one (its `pkg/epp/flowcontrol/README.md`). It is no end-to-end
deadline. The value is a duration as in Go: numbers with units, such as ``1m30s``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import Final

from sluice.router import wire
from sluice.router.errors import invalid, shown

MAX_TTL_S: Final = 86_400.0
"""Longest wait that may be stated, seconds."""

_NAME: Final = wire.QUEUE_TTL_HEADER.encode()
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_PART: Final = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ns|us|ms|s|m|h)"
_DURATION: Final = re.compile(rf"(?:{_PART}){{1,6}}")
_PARTS: Final = re.compile(_PART)


def queue_ttl_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """The longest wait in an admission queue, seconds, by these raw headers (lower-case names);
    infinite if they state none.

    Raises:
        ApiError: 400.
    """
    values = [value for name, value in headers if name == _NAME]
    if not values:
        return inf
    if len(values) > 1:
        raise invalid(
            f"{wire.QUEUE_TTL_HEADER} must be given once, got it several times",
            wire.QUEUE_TTL_HEADER,
        )
    text = values[0].decode("latin-1").strip(" ")
    ttl_s = 0.0
    if _DURATION.fullmatch(text):
        ttl_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(text))
    if not 0 < ttl_s <= MAX_TTL_S:
        raise invalid(
            f"{wire.QUEUE_TTL_HEADER} must be a duration such as 1500ms or 1m30s, more than 0 and "
            f"at most {MAX_TTL_S / 3_600:g}h, got {shown(text)}",
            wire.QUEUE_TTL_HEADER,
        )
    return ttl_s
