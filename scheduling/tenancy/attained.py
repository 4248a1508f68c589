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

from sluice.scheduling.latency.model import LatencyModel
from sluice.scheduling.request.kernels import (
    COMPUTED,
    EMITTED,
    FIXED,
    PENDING,
    PROGRAM,
    RUNNING,
    TENANT,
    WEIGHT,
    Floats,
    Ints,
    compiled,
    most_work_s,
    needs_prefill,
)

HALF_LIFE_S = 60.0
"""Time in which half of what was attained is forgotten, seconds."""

PAUSE_S = 1.0
"""A program that was in a plan within this time is not idle, seconds."""

MAX_KNOWN = 4_096
"""Maximum number of programs and tenants; beyond it the one that is idle for longest is dropped."""

# What is known of a program or tenant, ``float64[KNOWN, most]``, by name ascending.
NAME = 0  # of a program, or a negative number for a tenant
SECONDS = 1
AS_OF = 2  # when it had them, or was last in a plan
SINCE = 3  # when it had the first that is not forgotten
KNOWN = 4

# The columns of what a queue's rows have attained.
OWN = 0  # by the program, as a power of four; 0 without one
BEGAN = 1  # when that had the first of it; now, where it has had nothing
SHARED = 2  # by the tenant, over its weight
COLUMNS = 3


@compiled
def place_of(known: Floats, count: int, name: float) -> int:
    """The column of ``name``, or where it would be."""
    return int(np.searchsorted(known[NAME, :count], name))


@compiled
def left_of(known: Floats, place: int, now_s: float) -> float:
    """What is left as of now of what the name in ``place`` has attained."""
    idle_s = now_s - known[AS_OF, place]
    if known[NAME, place] > 0.0:
        idle_s -= PAUSE_S
    if idle_s <= 0.0:
        return known[SECONDS, place]
    return known[SECONDS, place] * 0.5 ** (idle_s / HALF_LIFE_S)


@compiled
def add(known: Floats, count: int, name: float, seconds: float, now_s: float) -> int:
    """``name`` attains ``seconds``; how many are known then. ``O(known)`` for a new name."""
    place = place_of(known, count, name)
    if place < count and known[NAME, place] == name:
        left = left_of(known, place, now_s)
        if power_of_four(left) == 0.0:
            known[SINCE, place] = now_s
        known[SECONDS, place] = seconds + left
        known[AS_OF, place] = now_s
        return count
    last = count
    if count == known.shape[1]:
        last = int(np.argmin(known[AS_OF]))  # not by service: those that begin have had least
    step = 1 if last < place else -1
    if step > 0:
        place -= 1
    for at in range(last, place, step):
        for field in range(KNOWN):
            known[field, at] = known[field, at + step]
    known[NAME, place], known[SECONDS, place] = name, seconds
    known[AS_OF, place] = known[SINCE, place] = now_s
    return min(count + 1, known.shape[1])


@compiled
def power_of_four(seconds: float) -> float:
    """The largest one that is not above ``seconds``; 0 below a 64th."""
    if seconds < 1 / 64:
        return 0.0
    _, exponent = frexp(seconds)
    return ldexp(1.0, (exponent - 1) // 2 * 2)


@compiled
def attained_of(known: Floats, count: int, table: Floats, now_s: float) -> Floats:
    """``float64[n, COLUMNS]``: what the programs and tenants have attained of rows that wait or
    prefill. These programs are not idle."""
    found = np.zeros((table.shape[0], COLUMNS))
    tenant, shared = -1.0, 0.0
    for row in range(table.shape[0]):
        if table[row, RUNNING] > 0.0 and not needs_prefill(
            table[row, EMITTED], table[row, PENDING]
        ):
            continue
        program = table[row, PROGRAM]
        found[row, BEGAN] = now_s
        if program > 0.0:
            place = place_of(known, count, program)
            if place < count and known[NAME, place] == program:
                known[SECONDS, place] = left_of(known, place, now_s)
                known[AS_OF, place] = now_s
                found[row, OWN] = power_of_four(known[SECONDS, place])
                if found[row, OWN] > 0.0:
                    found[row, BEGAN] = known[SINCE, place]
        if table[row, TENANT] != tenant:
            tenant, shared = table[row, TENANT], 0.0
            place = place_of(known, count, -1.0 - tenant)
            if place < count and known[NAME, place] == -1.0 - tenant:
                shared = left_of(known, place, now_s)
        found[row, SHARED] = shared / table[row, WEIGHT]
    return found


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
def settle(known: Floats, count: int, shares: Floats, now_s: float) -> int:
    """Add the shares of a batch; how many names are known then."""
    of_tenant = 0.0
    for place in range(shares.shape[1]):
        program, tenant, seconds = shares[0, place], shares[1, place], shares[2, place]
        if program > 0.0:
            count = add(known, count, program, seconds, now_s)
        of_tenant += seconds
        if place + 1 == shares.shape[1] or shares[1, place + 1] != tenant:
            count = add(known, count, -1.0 - tenant, of_tenant, now_s)
            of_tenant = 0.0
    return count


NONE_ATTAINED: Floats = np.empty((0, COLUMNS))
"""What the rows of a queue without programs have attained."""

_NO_SHARES: Floats = np.empty((3, 0))


class Attained:
    """Who has attained how much, on the caller's clock. ``O(log known)`` per row."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._known: Floats = np.zeros((KNOWN, most))
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
        if now_s > self._at_s:
            self._count = settle(self._known, self._count, self._shares, self._at_s)
            self._shares, self._at_s = _NO_SHARES, now_s
        return attained_of(self._known, self._count, table, now_s)

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
