"""What a client of the controller meets when there is no answer."""

from __future__ import annotations

from typing import Literal

Failure = Literal["timeout", "unavailable", "error", "full"]


class NoAnswerError(Exception):
    """The controller gave no answer; ``reason`` says why.

    ``timeout``: not in time. ``unavailable``: it is known not to answer, nothing was sent, or its
    process died. ``error``: it failed while it handled the call. ``full``: too much waits already.
    """

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason)
        self.reason: Failure = reason
