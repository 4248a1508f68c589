"""How many examples a property test tries."""

from __future__ import annotations

import hypothesis

FEWEST = 10


def examples(number: int) -> int:
    """For ``settings(max_examples=...)``: the profile's share of a ``number`` that is not small."""
    share = hypothesis.settings.default.max_examples / 100
    return max(round(number * share), min(number, FEWEST))
