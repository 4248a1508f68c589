"""D-EDF: FlowPrefill's policy with a simpler deadline check, the baseline of its Fig. 10."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sluice.scheduling.batching.s_edf import SEDF, SEDFOptions
from sluice.scheduling.request.kernels import Floats


class DEDFOptions(SEDFOptions):
    """Options of :class:`DEDF`."""

    late: Literal["last", "in_order"] = Field(
        default="last",
        description="Rank of prefills whose deadline has passed: behind all others (D-EDF), or by "
        "deadline like the others (the paper's naive EDF).",
    )


class DEDF(SEDF):
    """As :class:`~sluice.scheduling.batching.s_edf.SEDF`, but only a deadline that has passed ranks
    last.

    The numerator of Eq. 3 is ``sgn(deadline - now)``: the policy does not check whether a deadline
    can still be met. ``O(n log n)``.
    """

    name = "d_edf"
    source = "FlowPrefill §6.3, D-EDF and naive EDF"
    Options = DEDFOptions

    def __init__(self, options: DEDFOptions | None = None) -> None:
        options = options or DEDFOptions()
        super().__init__(options)
        self._late_last = options.late == "last"

    def _first(self, due_s: Floats, now_s: float, ttft_s: Floats) -> NDArray[np.bool_]:
        """Which prefills rank first, by deadline: the ones that are not late yet, or all."""
        first: NDArray[np.bool_] = (due_s >= now_s) | (not self._late_last)
        return first
