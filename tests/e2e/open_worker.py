"""A worker of vLLM that tests can look into."""

# mypy: disable-error-code="misc"

from __future__ import annotations

from numba import njit

from tests.replica.compiling import CompilingWorker


class OpenWorker(CompilingWorker):
    """vLLM loads it by its argument ``worker_cls``."""

    def compile_one(self) -> None:
        njit(lambda value: value + 1)(1)
