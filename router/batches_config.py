"""Configuration of files and batches: where they are kept and how much of them."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

HOUR_S = 3_600
DAY_S = 24 * HOUR_S

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")


class BatchesConfig(BaseModel):
    """Files and batches. All limits hold for the whole directory, not for each router, but those
    that say otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path | None = Field(
        default=None,
        description="Absolute path of the folder that holds files and batches; router replicas "
        "that share it share them. Null: `/v1/files` and `/v1/batches` are off.",
    )
    service_class: str = Field(
        default="batch",
        description="Class of a line that names none. Must be one of router.classes.",
    )
    completion_windows: tuple[str, ...] = Field(
        default=("24h",),
        min_length=1,
        max_length=16,
        description="Values of `completion_window` that are accepted, such as `24h` or `7d`.",
    )
    max_file_bytes: int = Field(
        default=200_000_000, ge=1 << 10, le=1 << 40, description="Largest upload, bytes."
    )
    max_lines: int = Field(
        default=50_000, ge=1, le=1_000_000, description="Most lines of one batch."
    )
    max_files_per_key: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Most uploaded files of one API key. With as many files of results no batch "
        "is taken.",
    )
    max_bytes_per_key: int = Field(
        default=10 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Most bytes of one API key, results included. Batches wait while it is passed.",
    )
    max_bytes: int = Field(
        default=50 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Most bytes in all, results included. Batches wait while it is passed.",
    )
    min_free_bytes: int = Field(
        default=256 << 20,
        ge=0,
        le=1 << 50,
        description="Least free bytes on the folder's disk. With less nothing is taken and batches "
        "wait, so that no answer is lost for want of a place to write it.",
    )
    max_unfinished_per_key: int = Field(
        default=100, ge=1, le=10_000, description="Most batches of one API key that have not ended."
    )
    max_ended_per_key: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Most ended batches of one API key that are remembered; the oldest go first.",
    )
    retention_s: float = Field(
        default=30.0 * DAY_S,
        ge=HOUR_S,
        le=3_650.0 * DAY_S,
        description="How long a file is kept where its maker says nothing, and a batch after its "
        "end, seconds.",
    )
    max_running: int = Field(
        default=4, ge=1, le=256, description="Most batches that one router replica runs at once."
    )
    max_lines_in_flight: int = Field(
        default=32,
        ge=1,
        le=4_096,
        description="Most lines that one router replica has under way at once.",
    )
    max_line_attempts: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Attempts of a line that fails by itself; each may try router.max_attempts "
        "replicas, as a live request does. Full replicas and refusals for lack of capacity do not "
        "count: such a line waits until its batch expires.",
    )
    max_uploads: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Most uploads into one router replica at once; more get 503. Where there are "
        "API keys each gets half of them at most, then 429.",
    )
    upload_timeout_s: float = Field(
        default=600.0, ge=1, le=86_400, description="Longest time for one upload, seconds."
    )
    poll_s: float = Field(
        default=2.0,
        ge=0.01,
        le=3_600,
        description="How often a router replica looks for batches that nobody runs, seconds.",
    )

    @field_validator("directory")
    @classmethod
    def _check_directory(cls, value: Path | None) -> Path | None:
        # Processes of the application have working directories of their own.
        if value is not None and not value.is_absolute():
            raise ValueError("batches.directory must be an absolute path")
        return value

    @field_validator("completion_windows")
    @classmethod
    def _check_windows(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        bad = [window for window in value if not _WINDOW.fullmatch(window)]
        if bad:
            raise ValueError(f"completion_windows must look like 24h or 7d, got {bad}")
        return value


def window_s(window: str) -> int:
    """Seconds of a completion window that the configuration accepts."""
    found = _WINDOW.fullmatch(window)
    assert found is not None
    return int(found[1]) * (HOUR_S if found[2] == "h" else DAY_S)
