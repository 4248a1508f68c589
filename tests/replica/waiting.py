"""Waiting for a condition that nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Return once ``condition`` holds; ``TimeoutError`` says that it never will."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
