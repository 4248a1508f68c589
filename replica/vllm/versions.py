"""The versions of vLLM that Sluice supports, and how another one is judged, without vLLM."""

from __future__ import annotations

import re
from typing import Final, Literal

Versions = tuple[tuple[int, int], tuple[int, int]]
"""The oldest supported minor version, and the newest that was run."""

SUPPORTED: Final[Versions] = ((0, 26), (0, 33))
"""Versions in which batch plans can be executed."""

WITH_PREEMPTION: Final[Versions] = ((0, 26), (0, 32))
"""Versions in which running prefills can be preempted."""

WITH_TRANSFER: Final[Versions] = ((0, 29), (0, 32))
"""Versions in which Sluice's connector can transfer KV."""

ASYNC_TRANSFER: Final[Versions] = ((0, 32), (0, 33))
"""Versions in which KV is transferred under asynchronous scheduling. In 0.29 a token was lost where
KV was short; 0.30 and 0.31 were not run so."""

WITH_PIPELINE: Final[Versions] = ((0, 29), (0, 32))
"""Versions in which several batches can be in a pipeline: a request that is preempted while one of
its tokens is on the way waits for that token."""

WITH_DATA_PARALLEL: Final[Versions] = ((0, 32), (0, 32))
"""Versions in which one engine can have several ranks, each with a queue of its own."""

WITH_HOST_MEMORY: Final[Versions] = ((0, 32), (0, 32))
"""Versions in which what vLLM keeps in the memory of the host is known."""

WITH_SPECULATION: Final[Versions] = ((0, 26), (0, 32))
"""Versions in which the plan can choose how many drafted tokens are checked."""

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


def age(version: str, versions: Versions) -> Literal["older", "known", "unknown"]:
    """Whether a version is older than the oldest supported one, lies between that and the newest
    that was run, or is unknown: newer, or without a number."""
    match = _RELEASE.match(version)
    if match is None:
        return "unknown"
    oldest, newest = versions
    release = int(match[1]), int(match[2])
    return "older" if release < oldest else "known" if release <= newest else "unknown"
