"""Stored records of files and batches, and their form in OpenAI's API."""

from __future__ import annotations

import enum
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

Purpose = Literal["batch", "batch_output"]


class Status(enum.StrEnum):
    """Status of a batch; the names are OpenAI's. ``CANCELLING`` is shown and never stored."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})

_TIMED: Final = (
    Status.IN_PROGRESS,
    Status.FINALIZING,
    Status.COMPLETED,
    Status.FAILED,
    Status.EXPIRED,
    Status.CANCELLING,
    Status.CANCELLED,
)
"""Statuses for which the API shows a time."""


class FileRecord(BaseModel):
    """A stored file. Times are Unix seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_s: float
    expires_s: float

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineFault(BaseModel):
    """Why a batch was refused: ``line`` counts from 1, and is ``None`` for the whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(BaseModel):
    """A batch. Times are Unix seconds; ``output_expires_s`` is a duration. ``expires_s``: when what
    is left will not be run; ``reached_s``: time of each status; ``cut_short``: cancelled or expired
    before all lines had run; ``faults``: why it was refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_s: float
    expires_s: float
    output_expires_s: float
    status: Status = Status.VALIDATING
    reached_s: dict[Status, float] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    cut_short: bool = False
    faults: tuple[LineFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED

    @property
    def cancelling(self) -> bool:
        """Whether it was cancelled."""
        return Status.CANCELLING in self.reached_s

    def at(self, status: Status, now_s: float, **changes: Any) -> BatchRecord:
        """A copy that has reached ``status`` now, with ``changes``."""
        reached_s = {**self.reached_s, status: now_s}
        return self.model_copy(update={"status": status, "reached_s": reached_s, **changes})

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        status = Status.CANCELLING if self.cancelling and not self.ended else self.status
        faults = [fault.model_dump() for fault in self.faults]
        reached = {f"{each.value}_at": self.reached_s.get(each) for each in _TIMED}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "errors": {"object": "list", "data": faults} if faults else None,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            **{name: None if at_s is None else int(at_s) for name, at_s in reached.items()},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


class Page(NamedTuple):
    """What a query asks for: at most ``limit`` objects, after the one with the id ``after``."""

    limit: int
    after: str | None = None
    newest_first: bool = True
