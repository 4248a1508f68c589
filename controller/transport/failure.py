"""The error of a controller's client when the controller does not answer."""

from __future__ import annotations

from typing import Literal

Failure = Literal["timeout", "unavailable", "error", "full"]


class NoAnswerError(Exception):
    """The controller gave no answer; ``reason`` says why.

    ``timeout``: no answer in time. ``unavailable``: it is known to be unresponsive, nothing was
    sent, or its process died. ``error``: it failed in the call. ``full``: the client's queue is
    full.
    """

    def __init__(self, reason: Failure) -> None:
        super().__init__(reason)
        self.reason: Failure = reason
