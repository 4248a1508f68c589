"""What an engine counts of the prompts whose KV it takes over."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TransferCounts:
    """Counters of the state table's summary, by its names; they only grow.

    Attributes:
        transfers: prompts whose KV arrived.
        transfer_seconds: that those took, from the wish for the KV to its arrival.
        transfer_tokens: of them that were moved.
        transfer_bytes: of KV.
        transfer_failures: prompts whose KV could not be had; they were computed here.
    """

    transfers: int = 0
    transfer_seconds: float = 0.0
    transfer_tokens: int = 0
    transfer_bytes: int = 0
    transfer_failures: int = 0

    def arrived(self, seconds: float, tokens: int, nbytes: int) -> None:
        """The KV of a prompt is here."""
        self.transfers += 1
        self.transfer_seconds += seconds
        self.transfer_tokens += tokens
        self.transfer_bytes += nbytes

    def failed(self) -> None:
        """The KV of a prompt could not be had."""
        self.transfer_failures += 1

    def summary(self) -> dict[str, float]:
        """The counters by name."""
        return asdict(self)
