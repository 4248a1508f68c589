"""What tests of benchmarks share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def imports_stay() -> None:
    """A benchmark collects garbage before each measurement: it need not look through all that the
    tests before it have imported."""
    gc.freeze()
