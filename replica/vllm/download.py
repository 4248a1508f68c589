"""How much of a model's files has come, in the phase of their download."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from sluice.telemetry.phases import phase, phase_detail

_PHASE = "engine: download"
_PERIOD_S = 1.0


class _Bytes(tqdm):  # type: ignore[misc]
    """Counts bytes in place of the bars that huggingface_hub would draw."""

    _of_files: _Bytes | None = None
    _said_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})
        if kwargs.get("unit") == "B":  # of two such bars, the last one counts what is on the disk
            _Bytes._of_files = self

    def update(self, n: float | None = 1) -> None:
        """As ``tqdm`` does where it is drawn; called by several threads."""
        self.n += n or 0
        now_s = time.monotonic()
        # The total is of the files that were begun.
        if self is _Bytes._of_files and self.total and now_s - _Bytes._said_s >= _PERIOD_S:
            _Bytes._said_s = now_s
            phase_detail(_PHASE, f"{self.n / 1e9:.2f} of at least {self.total / 1e9:.2f} GB")


def in_phase(download: Callable[..., str]) -> Callable[..., str]:
    """``HfApi.snapshot_download`` as a phase of the start."""

    @phase(_PHASE)
    def counted(*args: Any, **kwargs: Any) -> str:
        return download(*args, **{**kwargs, "tqdm_class": _Bytes})

    return counted
