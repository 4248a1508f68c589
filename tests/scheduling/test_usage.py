"""Shares of an engine's batches by tenant and class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.latency.model import LinearLatency
from sluice.scheduling.tenancy import usage
from sluice.scheduling.tenancy.usage import ACCOUNT, MAX_ACCOUNTS, EngineUsage

MODEL = LinearLatency(a=0.010, b=0.001, c=0.0001)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def engine(slots: int = 8) -> tuple[EngineUsage, np.ndarray]:
    records = np.zeros(MAX_ACCOUNTS, ACCOUNT)
    return EngineUsage(records, slots), records


def test_the_fixed_time_is_shared_equally_and_the_work_by_the_latency_model() -> None:
    used, records = engine()
    used.begin(0, "a", "chat")
    used.begin(1, "b", "chat")
    used.begin(2, "b", "chat")
    # 100 tokens of a prompt cost 0.1 s and their context 0.01 s; a decode at 99 tokens 0.011 s.
    shares = used.shares(MODEL.pieces, ints(0, 1, 2), ints(100, 1, 1), ints(0, 99, 99), 16)
    work_s = 0.110 + 2 * 0.011
    a_s, b_s = 0.110 + 0.010 / 3, 2 * (0.011 + 0.010 / 3)
    assert shares[0] == pytest.approx([0.0, a_s / (work_s + 0.010), b_s / (work_s + 0.010)])
    used.charge(shares, 0.5)  # it took longer than predicted
    assert records["seconds"][:3].sum() == pytest.approx(0.5)
    assert records["kv_block_seconds"][:3] == pytest.approx([0.0, 7 * 0.5, 14 * 0.5])
    assert [tuple(each) for each in records[["client", "class"]][:3]] == [
        (b"", b""),
        (b"a", b"chat"),
        (b"b", b"chat"),
    ]


def test_kv_counts_while_a_request_waits_with_it_and_not_once_it_is_gone() -> None:
    used, _ = engine()
    used.begin(0, "a", "chat")
    used.begin(1, "b", "chat")
    both = used.shares(MODEL.pieces, ints(0, 1), ints(32, 32), ints(0, 0), 16)
    assert both[1].tolist() == [0, 2, 2]
    other = used.shares(MODEL.pieces, ints(1), ints(1), ints(32), 16)
    assert other[1].tolist() == [0, 2, 3]
    used.release(0)
    assert used.shares(MODEL.pieces, ints(1), ints(1), ints(33), 16)[1].tolist() == [0, 0, 3]


def test_what_is_nobodys_has_no_slot_or_is_one_too_many_counts_for_the_first_account(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "MAX_ACCOUNTS", 2)
    used, records = engine()
    used.begin(0, "", "chat")
    used.begin(1, "a", "chat")
    used.begin(2, "b", "chat")
    used.begin(-1, "c", "chat")
    shares = used.shares(MODEL.pieces, ints(0, 1, 2, -1), ints(1, 1, 1, 1), ints(9, 9, 9, 9), 16)
    assert not records["client"][2:].any()
    assert shares[0] == pytest.approx([0.75, 0.25])


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(0, 4_000)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([MODEL, LinearLatency(a=0.01, b=0.0), LinearLatency(a=0.0, b=0.001)]),
)
def test_all_of_a_batch_is_someones(
    batch: list[tuple[int, int, int]], model: LinearLatency
) -> None:
    used, records = engine()
    for slot, (owner, _, _) in enumerate(batch):
        used.begin(slot, f"c{owner}", "chat")
    tokens, computed = ints(*(each[1] for each in batch)), ints(*(each[2] for each in batch))
    slots = np.arange(len(batch))
    shares = used.shares(model.pieces, slots, tokens, computed, 16)
    used.charge(shares, 2.0)
    assert records["seconds"].sum() == pytest.approx(2.0)
    assert shares[1].sum() == (-(-(tokens + computed) // 16)).sum()
    for slot in range(len(batch)):
        used.release(slot)
    assert not used._held.any()
