from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ledger import Ledger, Load


def test_a_reservation_counts_until_it_is_released() -> None:
    ledger = Ledger(ttl_s=5)
    assert ledger.reserve(1, "a", 100, now_s=0) == {"a"}
    assert ledger.reserve(2, "a", 50, now_s=0) == {"a"}
    assert ledger.load("a") == Load(2, 150)
    assert ledger.release([1, 99]) == {"a"}
    assert ledger.load("a") == Load(1, 50)
    assert ledger.release([1]) == set()


def test_a_second_decision_for_a_request_moves_its_reservation() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, "a", 100, now_s=0)
    assert ledger.reserve(1, "b", 70, now_s=1) == {"a", "b"}
    assert ledger.load("a") == Load(0, 0)
    assert ledger.load("b") == Load(1, 70)
    # Its age counts from the second decision.
    assert ledger.expire(5.5) == set()
    assert ledger.expire(6.0) == {"b"}


def test_reservations_expire_at_their_age_and_not_before() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, "a", 10, now_s=0)
    ledger.reserve(2, "b", 10, now_s=3)
    assert ledger.expire(4.999) == set()
    assert ledger.expire(5) == {"a"}
    assert len(ledger) == 1
    assert ledger.expired == 1


def test_a_full_ledger_gives_up_its_oldest() -> None:
    ledger = Ledger(ttl_s=5, limit=2)
    ledger.reserve(1, "a", 10, now_s=0)
    ledger.reserve(2, "b", 10, now_s=1)
    assert ledger.reserve(3, "c", 10, now_s=2) == {"a", "c"}
    assert 1 not in ledger
    assert len(ledger) == 2


def test_a_replica_takes_its_reservations_with_it() -> None:
    ledger = Ledger(ttl_s=5)
    for key in range(4):
        ledger.reserve(key, "ab"[key % 2], 10, now_s=0)
    assert ledger.drop_replica("a") == 2
    assert ledger.drop_replica("a") == 0
    assert list(ledger.entries()) == [1, 3]


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Ledger(ttl_s=0)
    with pytest.raises(ValueError, match="tokens >= 0"):
        Ledger(ttl_s=1).reserve(1, "a", -1, now_s=0)


_replicas = st.sampled_from(["a", "b", "c"])
_actions = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 20), _replicas, st.integers(0, 500)),
        st.tuples(st.just("release"), st.lists(st.integers(0, 20), max_size=4)),
        st.tuples(st.just("drop"), _replicas),
        # Eighths, so that sums are exact and an age is what it seems.
        st.tuples(st.just("wait"), st.integers(0, 32).map(lambda eighths: eighths / 8)),
    ),
    max_size=80,
)


@given(_actions)
def test_totals_equal_a_recount_and_all_drains_to_zero(actions: list[tuple[object, ...]]) -> None:
    ledger = Ledger(ttl_s=5, limit=12)
    now_s = 0.0
    for action in actions:
        before = {name: ledger.load(name) for name in "abc"}
        match action:
            case ("reserve", int(key), str(name), int(tokens)):
                changed = ledger.reserve(key, name, tokens, now_s)
            case ("release", list(keys)):
                changed = ledger.release(keys)
            case ("drop", str(name)):
                ledger.drop_replica(name)
                changed = {name}
            case ("wait", float(seconds)):
                now_s += seconds
                changed = ledger.expire(now_s)
            case _:
                raise AssertionError(action)
        requests: Counter[str] = Counter()
        tokens_at: Counter[str] = Counter()
        for entry in ledger.entries().values():
            requests[entry.replica_id] += 1
            tokens_at[entry.replica_id] += entry.tokens
            assert now_s - entry.made_s <= 5
        for name in "abc":
            assert ledger.load(name) == Load(requests[name], tokens_at[name])
            # Whoever keeps views of the totals must hear of every change.
            assert name in changed or ledger.load(name) == before[name]
        assert len(ledger) <= 12
    ledger.expire(now_s + 5)
    assert len(ledger) == 0
    assert all(ledger.load(name) == Load(0, 0) for name in "abc")
    assert not ledger._loads and not ledger._keys
