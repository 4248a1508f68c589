"""D-EDF: FlowPrefill's policy with a simpler look at deadlines, the comparison of its Fig. 10."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from scheduling.batching.s_edf import SEDF, SEDFOptions
from scheduling.kernels import Floats


class DEDFOptions(SEDFOptions):
    """Options of :class:`DEDF`."""

    late: Literal["last", "in_order"] = Field(
        default="last",
        description="Where prefills rank whose deadline has passed: behind all others (D-EDF), or "
        "by deadline like the others (the paper's naive EDF).",
    )


class DEDF(SEDF):
    """As :class:`~scheduling.batching.s_edf.SEDF`, but only a deadline that has passed ranks last.

    The numerator of Eq. 3 is ``sgn(deadline - now)``: whether the deadline can still be met is not
    looked at. ``O(n log n)``.
    """

    name = "d_edf"
    source = "FlowPrefill §6.3, D-EDF and naive EDF"
    Options = DEDFOptions

    def __init__(self, options: DEDFOptions | None = None) -> None:
        options = options or DEDFOptions()
        super().__init__(options)
        self._late_last = options.late == "last"

    def _first(self, due_s: Floats, now_s: float, ttft_s: Floats) -> NDArray[np.bool_]:
        """Which prefills rank first, by deadline: those that are not late yet, or all."""
        first: NDArray[np.bool_] = (due_s >= now_s) | (not self._late_last)
        return first
