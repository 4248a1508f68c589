"""A cluster in a process of its own, so that several can be measured one after the other.

Ray and Serve read most of their settings once, when they are imported: a second cluster of the
same process would look for the token, the ports and the sockets of the first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

import click

from sluice.deploy.local import stop_signals

_LOOK_EVERY_S = 0.2

P = ParamSpec("P")
R = TypeVar("R")


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of ``function`` in a new process, which gets SIGTERM when this one is stopped.

    Function, arguments and result must be picklable. Exceptions of the function are raised here.

    Raises:
        Abort: the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with stop_signals() as stop, ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(function, *args, **kwargs)
        while not future.done():
            if stop.wait(_LOOK_EVERY_S):
                for process in multiprocessing.active_children():
                    process.terminate()
                break
        try:
            return future.result()
        except BrokenProcessPool:
            raise click.Abort from None
