"""Calls of one function in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def in_processes(
    function: Callable[[T], R], jobs: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Gives a function that applies ``function`` to values in ``jobs`` processes and yields the
    results in order, as soon as they are there.

    With one job everything runs in this process. What is not yet begun when the block is left is
    not begun any more.
    """
    if jobs == 1:
        yield partial(map, function)
        return
    # Forked processes would inherit threads; new ones load the compiled loops from their cache.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            yield partial(pool.map, function)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
