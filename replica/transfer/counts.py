"""Counters of KV transfers to an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounts:
    """Counters of the state table's summary, by its names; they only grow.

    Attributes:
        transfers: prompts whose KV arrived.
        transfer_seconds: time that these took, from the request for the KV to its arrival.
        transfer_tokens: their tokens whose KV was transferred.
        transfer_bytes: bytes of KV that were transferred.
        transfer_failures: prompts whose KV transfer failed; they were recomputed here.
    """

    transfers: int = 0
    transfer_seconds: float = 0.0
    transfer_tokens: int = 0
    transfer_bytes: int = 0
    transfer_failures: int = 0

    def arrived(self, seconds: float, tokens: int, nbytes: int) -> None:
        """The KV of a prompt has arrived."""
        self.transfers += 1
        self.transfer_seconds += seconds
        self.transfer_tokens += tokens
        self.transfer_bytes += nbytes

    def failed(self) -> None:
        """The KV transfer of a prompt failed."""
        self.transfer_failures += 1

    def summary(self) -> dict[str, float]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}
