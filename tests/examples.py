"""How many examples a property test tries."""

from __future__ import annotations

import hypothesis

FEWEST = 10


def examples(number: int) -> int:
    """For ``settings(max_examples=...)`` of a test that needs more or fewer than most: a share of
    ``number`` as the profile tries a share of Hypothesis's usual 100, see ``tests/conftest.py``.
    A small ``number`` stays."""
    share = hypothesis.settings.default.max_examples / 100
    return max(round(number * share), min(number, FEWEST))
