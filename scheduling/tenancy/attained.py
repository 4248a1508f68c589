"""Attained service: how much of an engine's time programs and tenants have had lately. A program is
what several requests count for, such as an agent's session with its sub-agents.

Which has had least goes first, as in Autellix (arXiv 2502.13965, §4.2): a loop of few turns does
not wait behind one of many, and no length needs to be known. What was attained counts by powers of
four: of like programs the one that began first goes first, and is done sooner than if all took
turns. It is forgotten while a program has no request, not while one waits. Tenants are counted as
well, so that none gains by splitting its work."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from math import exp2, frexp, inf, ldexp

import numpy as np

from sluice.scheduling.kept_kv import RELEASE_S
from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    FIXED,
    PENDING,
    PROGRAM,
    PROMPT,
    RUNNING,
    TENANT,
    WEIGHT,
    Floats,
    Ints,
    compiled,
    copy_row,
    most_work_s,
    needs_prefill,
)

HALF_LIFE_S = 60.0
"""Time in which half of what was attained is forgotten, seconds."""

PAUSE_S = 1.0
"""A program that was in a plan within this time is not idle, seconds."""

MAX_KNOWN = 4_096
"""Maximum number of programs and tenants; beyond it the one that is idle for longest is dropped."""

# What is known of a program or tenant, a row of ``float64[slots, KNOWN]``: a hash table, half full
# at most, as a plan looks up each of its requests.
MIN_SLOTS = 64
NAME = 0  # of a program, or a negative number for a tenant; 0 in a free slot
SECONDS = 1
AS_OF = 2  # when it had them, or was last in a plan
SINCE = 3  # when it had the first that is not forgotten
TOKENS = 4  # prompt and output of its last request that waited or prefilled
KNOWN = 5

# The columns of what a queue's rows have attained.
OWN = 0  # by the program, as a power of four; 0 without one
BEGAN = 1  # when that had the first of it; now, where it has had nothing
SHARED = 2  # by the tenant, over its weight
COLUMNS = 3


@compiled
def first_slot(name: float, last: int) -> int:
    """Where the search for ``name`` begins; ``last``: the last slot."""
    return (int(abs(name)) * 2_654_435_761 >> 15) & last


@compiled
def slot_of(known: Floats, name: float) -> int:
    """The slot of ``name``, or the free one that it would have."""
    last = known.shape[0] - 1
    slot = first_slot(name, last)
    while known[slot, NAME] != 0.0 and known[slot, NAME] != name:
        slot = (slot + 1) & last
    return slot


@compiled
def left_of(known: Floats, slot: int, now_s: float) -> float:
    """What is left as of now of what the name in ``slot`` has attained."""
    idle_s = now_s - known[slot, AS_OF]
    if known[slot, NAME] > 0.0:
        idle_s -= PAUSE_S
    if idle_s <= 0.0:
        return known[slot, SECONDS]
    return known[slot, SECONDS] * 0.5 ** (idle_s / HALF_LIFE_S)


@compiled
def drop(known: Floats, slot: int) -> None:
    """Free a slot; names behind it that could not have theirs move up."""
    last = known.shape[0] - 1
    at = (slot + 1) & last
    while known[at, NAME] != 0.0:
        if (at - first_slot(known[at, NAME], last)) & last >= (at - slot) & last:
            copy_row(known[slot], known[at])
            slot = at
        at = (at + 1) & last
    known[slot, NAME] = 0.0


@compiled
def add(known: Floats, count: int, most: int, name: float, seconds: float, now_s: float) -> int:
    """``name`` attains ``seconds``; how many are known then. ``O(1)``, but ``O(slots)`` for a new
    name where ``most`` are known."""
    slot = slot_of(known, name)
    if known[slot, NAME] == name:
        left = left_of(known, slot, now_s)
        if power_of_four(left) == 0.0:
            known[slot, SINCE] = now_s
        known[slot, SECONDS] = seconds + left
        known[slot, AS_OF] = now_s
        return count
    if count == most:
        oldest, idle_since_s = 0, inf  # not by service: those that begin have had least
        for each in range(known.shape[0]):
            if known[each, NAME] != 0.0 and known[each, AS_OF] < idle_since_s:
                oldest, idle_since_s = each, known[each, AS_OF]
        drop(known, oldest)
        slot = slot_of(known, name)
        count -= 1
    known[slot, NAME], known[slot, SECONDS] = name, seconds
    known[slot, AS_OF] = known[slot, SINCE] = now_s
    known[slot, TOKENS] = 0.0
    return count + 1


@compiled
def power_of_four(seconds: float) -> float:
    """The largest one that is not above ``seconds``; 0 below a 64th."""
    if seconds < 1 / 64:
        return 0.0
    _, exponent = frexp(seconds)
    return ldexp(1.0, (exponent - 1) // 2 * 2)


@compiled
def attained_of(known: Floats, table: Floats, now_s: float) -> Floats:
    """``float64[n, COLUMNS]``: what the programs and tenants have attained of rows that wait or
    prefill. These programs are not idle."""
    found = np.zeros((table.shape[0], COLUMNS))
    for row in range(table.shape[0]):
        if table[row, RUNNING] > 0.0 and not needs_prefill(
            table[row, EMITTED], table[row, PENDING]
        ):
            continue
        program, tenant = table[row, PROGRAM], -1.0 - table[row, TENANT]
        found[row, BEGAN] = now_s
        slot = slot_of(known, program)
        if program > 0.0 and known[slot, NAME] == program:
            known[slot, SECONDS] = left_of(known, slot, now_s)
            known[slot, AS_OF] = now_s
            found[row, OWN] = power_of_four(known[slot, SECONDS])
            known[slot, TOKENS] = table[row, PROMPT] + table[row, EMITTED]
            if found[row, OWN] > 0.0:
                found[row, BEGAN] = known[slot, SINCE]
        slot = slot_of(known, tenant)
        if known[slot, NAME] == tenant:
            found[row, SHARED] = left_of(known, slot, now_s) / table[row, WEIGHT]
    return found


@compiled
def older_of(known: Floats, began_s: Floats, now_s: float) -> Floats:
    """Tokens in the conversations of all programs that began before each of ``began_s``, which are
    ascending, and had a request within the last minute. ``O(known log began_s)``."""
    tokens = np.zeros(began_s.shape[0] + 1)
    for slot in range(known.shape[0]):
        if known[slot, NAME] > 0.0 and known[slot, AS_OF] > now_s - RELEASE_S:
            place = np.searchsorted(began_s, known[slot, SINCE], side="right")
            tokens[place] += known[slot, TOKENS]
    return np.cumsum(tokens)[:-1]


@compiled
def shares_of(table: Floats, rows: Ints, tokens: Ints, pieces: Floats) -> Floats:
    """``float64[3, rows]``: program, tenant and seconds of each request of a batch: its work, and
    an equal part of the fixed time."""
    shares = np.empty((3, rows.shape[0]))
    fixed_s = 0.0
    for piece in range(pieces.shape[0]):
        fixed_s = max(fixed_s, pieces[piece, FIXED])
    for place in range(rows.shape[0]):
        row = rows[place]
        shares[0, place], shares[1, place] = table[row, PROGRAM], table[row, TENANT]
        work_s = most_work_s(pieces, float(tokens[place]), table[row, COMPUTED])
        shares[2, place] = work_s + fixed_s / rows.shape[0]
    return shares


@compiled
def settle(
    known: Floats,
    count: int,
    most: int,
    shares: Floats,
    at_s: float,
    table: Floats,
    now_s: float,
) -> tuple[Floats, int]:
    """Add the shares of a batch that began at ``at_s``; ``attained_of`` the rows, and how many
    names are known then."""
    for place in range(shares.shape[1]):
        program, tenant, seconds = shares[0, place], shares[1, place], shares[2, place]
        if program > 0.0:
            count = add(known, count, most, program, seconds, at_s)
        count = add(known, count, most, -1.0 - tenant, seconds, at_s)
    return attained_of(known, table, now_s), count


@compiled
def moved(known: Floats, added: int, most: int, now_s: float) -> tuple[Floats, int]:
    """What is known in a table with room for ``added`` names more, without those that are idle and
    have nothing left; how many are known then."""
    left = np.zeros(known.shape[0], np.bool_)
    for slot in range(known.shape[0]):
        live = known[slot, AS_OF] > now_s - RELEASE_S
        had = live or power_of_four(left_of(known, slot, now_s)) > 0.0
        left[slot] = had and known[slot, NAME] != 0.0
    rows = np.flatnonzero(left)
    slots = MIN_SLOTS
    while slots < min(3 * (rows.shape[0] + added), 2 * most):
        slots *= 2
    table = np.zeros((slots, KNOWN))
    for row in rows:
        copy_row(table[slot_of(table, known[row, NAME])], known[row])
    return table, rows.shape[0]


NONE_ATTAINED: Floats = np.empty((0, COLUMNS))
"""What the rows of a queue without programs have attained."""

_NO_SHARES: Floats = np.empty((3, 0))


class Attained:
    """Who has attained how much, on the caller's clock. ``O(1)`` per row."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self.known: Floats = np.zeros((MIN_SLOTS, KNOWN))
        """What is known, see :func:`older_of`."""
        self._most = most
        self._count = 0
        # The last batch counts from the next moment on: to plan it again changes nothing.
        self._shares: Floats = _NO_SHARES
        self._at_s = -inf

    def __len__(self) -> int:
        """Number of known programs and tenants."""
        return self._count

    def of(self, table: Floats, now_s: float) -> Floats:
        """``float64[n, COLUMNS]``: what the programs and tenants have attained of rows that wait or
        prefill; 0 for the others."""
        shares, at_s = _NO_SHARES, self._at_s
        if now_s > at_s:
            shares, self._shares, self._at_s = self._shares, _NO_SHARES, now_s
            added = 2 * shares.shape[1]
            if 2 * min(self._count + added, self._most) > len(self.known):
                self.known, self._count = moved(self.known, added, self._most, at_s)
        found, self._count = settle(self.known, self._count, self._most, shares, at_s, table, now_s)
        return found

    def charge(
        self, table: Floats, rows: Ints, tokens: Ints, latency: LatencyModel, now_s: float
    ) -> None:
        """The engine runs a batch of ``rows``, in the place of another one at the same time."""
        self._shares, self._at_s = shares_of(table, rows, tokens, latency.pieces), now_s


class ProgramTokens:
    """Tokens that programs have had lately, where no engine's time is known: halved in
    ``half_life_s``. Beyond ``most`` the one that has had none for longest is dropped. ``O(1)``."""

    def __init__(self, most: int = MAX_KNOWN, half_life_s: float = HALF_LIFE_S) -> None:
        self._most = most
        self._half_life_s = half_life_s
        self._had: dict[int, tuple[float, float]] = {}

    def of(self, program: int, now_s: float) -> float:
        """Tokens of ``program`` as of now."""
        tokens, as_of_s = self._had.get(program, (0.0, now_s))
        return tokens * exp2((as_of_s - now_s) / self._half_life_s)

    def add(self, program: int, tokens: float, now_s: float) -> None:
        """A request of ``program`` has had more."""
        had = self.of(program, now_s) + tokens
        self._had.pop(program, None)
        self._had[program] = had, now_s
        if len(self._had) > self._most:
            del self._had[next(iter(self._had))]
