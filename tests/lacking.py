"""What tests need and a machine may not have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(message: str) -> NoReturn:
    """Skip the test, or the module, but never in CI: there it fails."""
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message, allow_module_level=True)
