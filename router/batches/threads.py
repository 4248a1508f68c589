"""Threads for calls that block, apart from those that other parts of a router use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Threads:
    """A bounded number of threads. To be used from one event loop."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="batches")

    async def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call ``function`` in a thread. If cancelled, this waits for its end first, so that a
        file is never closed while it is used."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not call.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # has been looked at
            raise

    def close(self) -> None:
        """Accept no more work; running calls end by themselves."""
        self._threads.shutdown(wait=False)
