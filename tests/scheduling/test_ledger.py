from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.scheduling.fleet.report import _MOST_STALE, Ledger, Reservation


def made(
    replica_id: str, tokens: float = 10, now_s: float = 0, awaited_s: float = -inf
) -> Reservation:
    """A decision that takes ``tokens`` of a replica."""
    return Reservation(
        replica_id, now_s, True, tokens, 0, tokens, now_s + 1, 0.1, 1, 100, awaited_s
    )


def tokens_at(ledger: Ledger, replica_id: str) -> list[float]:
    return [entry.new_tokens for entry in ledger.at(replica_id)]


def test_a_reservation_counts_until_it_is_released() -> None:
    ledger = Ledger(ttl_s=5)
    assert ledger.reserve(1, made("a", 100)) == set()
    assert ledger.reserve(2, made("a", 50)) == set()
    assert tokens_at(ledger, "a") == [100, 50]
    assert ledger.release([1, 99]) == {"a"}
    assert tokens_at(ledger, "a") == [50]
    assert ledger.release([1]) == set()


def test_a_second_decision_for_a_request_moves_its_reservation() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, made("a", 100))
    assert ledger.reserve(1, made("b", 70, now_s=1)) == {"a"}
    assert tokens_at(ledger, "a") == []
    assert tokens_at(ledger, "b") == [70]
    # Its age counts from the second decision.
    assert ledger.expire(5.5) == set()
    assert ledger.expire(6.0) == {"b"}


def test_reservations_expire_at_their_age_and_not_before() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, made("a"))
    ledger.reserve(2, made("b", now_s=3))
    assert ledger.expire(4.999) == set()
    assert ledger.expire(5) == {"a"}
    assert len(ledger) == 1
    assert ledger.expired == 1


def test_one_that_is_awaited_later_expires_later() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, made("a", awaited_s=20))
    ledger.reserve(2, made("b", awaited_s=-3))
    assert ledger.expire(5) == {"b"}
    assert ledger.expire(24.9) == set()
    assert ledger.expire(25) == {"a"}


def test_what_nobody_could_confirm_is_postponed() -> None:
    ledger = Ledger(ttl_s=5)
    ledger.reserve(1, made("a"))
    ledger.reserve(2, made("b", now_s=1, awaited_s=3))
    ledger.postpone(10)
    ledger.reserve(3, made("c", now_s=10))
    assert ledger.expire(14.9) == set()
    assert ledger.expire(15) == {"a", "c"}
    assert ledger.expire(17.9) == set()
    assert ledger.expire(18) == {"b"}


def test_the_ends_of_ended_reservations_are_forgotten() -> None:
    ledger = Ledger(ttl_s=5)
    for key in range(5 * _MOST_STALE):
        ledger.reserve(key, made("a", now_s=key / 1_000))
        ledger.release([key])
        assert len(ledger._ends) <= _MOST_STALE + 2
    assert ledger.expire(1_000) == set()
    assert ledger.expired == 0


def test_a_full_ledger_gives_up_the_one_that_would_expire_first() -> None:
    ledger = Ledger(ttl_s=5, limit=2)
    ledger.reserve(1, made("b", awaited_s=7))
    ledger.reserve(2, made("a", now_s=1))
    assert ledger.reserve(3, made("c", now_s=2)) == {"a"}
    assert 2 not in ledger
    assert len(ledger) == 2


def test_a_replica_takes_its_reservations_with_it() -> None:
    ledger = Ledger(ttl_s=5)
    for key in range(4):
        ledger.reserve(key, made("ab"[key % 2]))
    assert ledger.drop_replica("a") == 2
    assert ledger.drop_replica("a") == 0
    assert [key for key in range(4) if key in ledger] == [1, 3]


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Ledger(ttl_s=0)
    with pytest.raises(ValueError, match="tokens >= 0"):
        Ledger(ttl_s=1).reserve(1, made("a", -1))


_replicas = st.sampled_from(["a", "b", "c"])
_actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("reserve"),
            st.integers(0, 20),
            _replicas,
            st.integers(0, 500),
            st.sampled_from([0, 2, 30]),
        ),
        st.tuples(st.just("release"), st.lists(st.integers(0, 20), max_size=4)),
        st.tuples(st.just("drop"), _replicas),
        # Eighths, so that an age is what it seems.
        st.tuples(st.just("wait"), st.integers(0, 32).map(lambda eighths: eighths / 8)),
    ),
    max_size=80,
)


@given(_actions)
def test_what_is_reserved_equals_a_recount_and_all_drains_to_zero(
    actions: list[tuple[object, ...]],
) -> None:
    ledger = Ledger(ttl_s=5, limit=12)
    now_s = 0.0
    # Oldest first, as the ledger has them.
    known: dict[int, Reservation] = {}

    def ends_s(key: int) -> tuple[float, int]:
        entry = known[key]
        return max(entry.made_s, entry.awaited_s) + 5, key

    for action in actions:
        before = {name: tokens_at(ledger, name) for name in "abc"}
        match action:
            case ("reserve", int(key), str(name), int(tokens), int(later_s)):
                entry = made(name, tokens, now_s, now_s + later_s if later_s else -inf)
                changed = ledger.reserve(key, entry) | {name}
                if known.pop(key, None) is None and len(known) == 12:
                    known.pop(min(known, key=ends_s))
                known[key] = entry
            case ("release", list(keys)):
                changed = ledger.release(keys)
                known = {key: entry for key, entry in known.items() if key not in keys}
            case ("drop", str(name)):
                ledger.drop_replica(name)
                changed = {name}
                known = {k: entry for k, entry in known.items() if entry.replica_id != name}
            case ("wait", float(seconds)):
                now_s += seconds
                changed = ledger.expire(now_s)
                known = {k: entry for k, entry in known.items() if ends_s(k)[0] > now_s}
            case _:
                raise AssertionError(action)
        for name in "abc":
            expected = [e.new_tokens for e in known.values() if e.replica_id == name]
            assert tokens_at(ledger, name) == expected
            # Whoever keeps sums must hear of every change.
            assert name in changed or tokens_at(ledger, name) == before[name]
        assert len(ledger) == len(known) <= 12
    ledger.expire(now_s + 35)
    assert len(ledger) == 0
    assert not ledger._of_replica
