"""OpenAI's lists: pages of objects, each page after the last object of the one before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from sluice.router.batches.records import BatchRecord, FileRecord
from sluice.router.errors import invalid, shown

_DIGITS = re.compile(r"[0-9]{1,9}")


class Page(NamedTuple):
    """What a query asks for: at most ``limit`` objects, after the one with the id ``after``."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def page_of(request: Request, default: int, most: int) -> Page:
    """The page that a query asks for with ``after`` and ``limit``.

    Args:
        default, most: objects in a page if the query does not state it, and at most.

    Raises:
        ApiError: 400.
    """
    query = request.query_params
    limit = query.get("limit", str(default))
    if not _DIGITS.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be an integer from 1 to {most}, got {shown(limit)}", "limit")
    return Page(int(limit), query.get("after"))


def listed(records: Sequence[FileRecord | BatchRecord], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    data = [record.shown() for record in records]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
