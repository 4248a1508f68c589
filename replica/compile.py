"""Compile the loops of every policy ahead: ``python -m sluice.replica.compile``. The result is kept
beside the sources or in ``NUMBA_CACHE_DIR``; a start then saves up to a minute of one core."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from sluice.controller.transport import checks
from sluice.replica.scheduler import row_counts
from sluice.scheduling import admission, batching, routing
from sluice.scheduling.placement.warm_up import warm_up_placement
from sluice.simulation import rows


def _placements() -> None:
    for name in routing.POLICIES.own:
        warm_up_placement(partial(routing.make_policy, name), lambda: None)
    for name in admission.POLICIES.own:
        any_routing = partial(routing.make_policy, next(iter(routing.POLICIES.own)))
        warm_up_placement(any_routing, partial(admission.make_policy, name))
    checks.compile_now()


def _batches() -> None:
    for name in batching.POLICIES.own:
        row_counts.compile_now(name)
    rows.compile_now()


def main() -> None:
    """Compile in two processes: each has about half of it."""
    parts: tuple[Callable[[], None], ...] = (_batches, _placements)
    with ProcessPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(part) for part in parts]:
            done.result()


if __name__ == "__main__":
    main()
