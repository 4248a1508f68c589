"""Who uses an engine: the seconds of its batches, and the KV blocks that requests hold meanwhile,
by tenant and service class.

A batch's fixed time is shared equally by its sequences, its work by the latency model; the shares
are of its real time, so all accounts together have the engine's busy time, whatever becomes of the
requests."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Final

import numpy as np

from sluice.scheduling.request.kernels import FIXED, Floats, Ints, compiled, most_work_s

MAX_ACCOUNTS: Final = 1_024
"""Of one engine; what more there are counts for the first one."""

ACCOUNT = np.dtype(
    [("client", "S64"), ("class", "S64"), ("seconds", "<f8"), ("kv_block_seconds", "<f8")]
)
"""A tenant's use in one class. The first account has what is of no tenant: profiling, warm-up."""

NO_ACCOUNTS = np.empty(0, ACCOUNT)

NO_SHARES: Floats = np.empty((2, 0))


@compiled
def shares_of_batch(
    pieces: Floats,
    slots: Ints,
    tokens: Ints,
    computed: Ints,
    accounts: Ints,
    blocks: Ints,
    held: Floats,
    block_tokens: int,
) -> Floats:
    """``float64[2, accounts]``: shares of a batch's time, and KV blocks held while it runs; its
    requests have more of them now. By slot: their ``accounts`` and ``blocks``, of which ``held``
    has the sums. Slot -1: none."""
    shares = np.zeros((2, held.shape[0]))
    count = slots.shape[0]
    fixed_s = all_s = 0.0
    for piece in range(pieces.shape[0]):
        fixed_s = max(fixed_s, pieces[piece, FIXED])
    for place in range(count):
        slot, account = slots[place], accounts[slots[place]]
        seconds = most_work_s(pieces, float(tokens[place]), float(computed[place]))
        seconds += (fixed_s + 1e-12) / count  # where nothing costs anything, all have as much
        shares[0, account] += seconds
        all_s += seconds
        if slot >= 0:
            more = -(-(computed[place] + tokens[place]) // block_tokens) - blocks[slot]
            blocks[slot] += more
            held[account] += more
    for account in range(held.shape[0]):
        shares[0, account] /= all_s
        shares[1, account] = held[account]
    return shares


class EngineUsage:
    """The accounts of one engine, in ``records``, ``ACCOUNT[MAX_ACCOUNTS]``; ``slots``: most
    requests that have one. ``O(batch + accounts)`` a batch, else ``O(1)``."""

    def __init__(self, records: np.ndarray, slots: int) -> None:
        self._records = records
        self._used = records["seconds"], records["kv_block_seconds"]
        self._numbers = {("", ""): 0}
        # By slot; in the last place what is of requests without one.
        self._accounts: Ints = np.zeros(slots + 1, np.int64)
        self._blocks: Ints = np.zeros(slots + 1, np.int64)
        self._held: Floats = np.zeros(1)

    def begin(self, slot: int, client: str, service_class: str) -> None:
        """A request has this slot now. Without a ``client`` it is no client's."""
        if slot < 0:
            return
        key = (client, service_class) if client else ("", "")
        number = self._numbers.get(key)
        if number is None:
            number = len(self._numbers)
            if number == MAX_ACCOUNTS:
                number = 0
            else:
                self._records[number] = client.encode(), service_class.encode(), 0.0, 0.0
                self._numbers[key] = number
                self._held = np.append(self._held, 0.0)
        self._accounts[slot] = number

    def release(self, slot: int) -> None:
        """A request has ended, or has lost its KV."""
        if slot >= 0:
            self._held[self._accounts[slot]] -= self._blocks[slot]
            self._blocks[slot] = 0

    def shares(
        self, pieces: Floats, slots: Ints, tokens: Ints, computed: Ints, block_tokens: int
    ) -> Floats:
        """A batch begins: its shares, see :func:`shares_of_batch`."""
        arrays = slots, tokens, computed, self._accounts, self._blocks, self._held
        return shares_of_batch(pieces, *arrays, block_tokens)

    def charge(self, shares: Floats, seconds: float) -> None:
        """A batch with these shares has taken ``seconds``."""
        for used, added in zip(self._used, shares * seconds, strict=True):
            used[: len(added)] += added
