"""OpenAI's lists: pages of objects, each page after the last object of the one before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from sluice.router.batches.records import BatchRecord, FileRecord
from sluice.router.errors import ApiError, Reason, invalid, shown

_DIGITS = re.compile(r"[0-9]{1,9}")

_Record = TypeVar("_Record", FileRecord, BatchRecord)


def page(request: Request, records: Sequence[_Record], default: int, most: int) -> dict[str, Any]:
    """The page of ``records`` that the query asks for with ``after`` and ``limit``.

    Args:
        default, most: objects in a page where the query says nothing, and at most.

    Raises:
        ApiError: 400, or 404 where there is no object ``after``.
    """
    limit = _limit(request, default, most)
    after = request.query_params.get("after")
    start = 0
    if after is not None:
        ids = [record.id for record in records]
        if after not in ids:
            raise ApiError(Reason.NOT_FOUND, f"There is no object {shown(after)}.", "after")
        start = ids.index(after) + 1
    data = [record.shown() for record in records[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(records),
    }


def _limit(request: Request, default: int, most: int) -> int:
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise invalid(f"limit must be an integer from 1 to {most}, got {shown(text)}", "limit")
    return int(text)
