"""The objective of a prompt's computation on another replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.router.dispatch.retries import prompt_slo
from sluice.scheduling.request.objective import SLO


def test_it_is_due_earlier_by_the_kv_transfer() -> None:
    assert prompt_slo(SLO(ttft_s=1.0, tpot_s=0.1), 0.25) == SLO(ttft_s=0.75, tpot_s=0.1)
    assert prompt_slo(SLO(e2e_s=9.0), 0.25) == SLO(e2e_s=9.0)


@given(st.floats(1e-3, 1e4), st.floats(0, 1e5))
def test_some_time_is_always_left(ttft_s: float, kv_transfer_s: float) -> None:
    left_s = prompt_slo(SLO(ttft_s=ttft_s), kv_transfer_s).ttft_s
    assert left_s is not None
    assert 0 < left_s <= ttft_s
