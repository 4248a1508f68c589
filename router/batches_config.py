"""Configuration of files and batches: their storage and limits."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

HOUR_S = 3_600
DAY_S = 24 * HOUR_S

_BUCKET = re.compile(r"(?:s3|gs)://[^/?#@]+(?:/[^?#]*)?")
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")


class BatchesConfig(BaseModel):
    """Files and batches. Limits apply to the whole directory and not per router, unless they state
    otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path | None = Field(
        default=None,
        description="Absolute path of the folder that holds files and batches; router replicas "
        "that share it share them. Null: `/v1/files` and `/v1/batches` are off.",
    )
    url: str | None = Field(
        default=None,
        description="Bucket and prefix of the files' bytes, such as `s3://bucket/sluice` or "
        "`gs://bucket/sluice`; the state stays in the directory. Credentials, region and endpoint "
        "come from the environment or the machine's role. Null: in the directory.",
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
        default=200_000_000, ge=1 << 10, le=1 << 40, description="Maximum size of an upload, bytes."
    )
    max_lines: int = Field(
        default=50_000, ge=1, le=1_000_000, description="Maximum lines of one batch."
    )
    max_files_per_key: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Maximum uploaded files of one API key. With as many result files, new batches "
        "are refused.",
    )
    max_bytes_per_key: int = Field(
        default=10 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Maximum bytes of one API key, results included. Batches wait while it is "
        "exceeded.",
    )
    max_bytes: int = Field(
        default=50 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Maximum bytes in total, results included. Batches wait while it is exceeded.",
    )
    min_free_bytes: int = Field(
        default=256 << 20,
        ge=0,
        le=1 << 50,
        description="Minimum free bytes on the directory's disk. With fewer, uploads are refused "
        "and batches wait, so that no answer is lost because it cannot be written.",
    )
    max_unfinished_per_key: int = Field(
        default=100, ge=1, le=10_000, description="Maximum unfinished batches of one API key."
    )
    max_ended_per_key: int = Field(
        default=1_000,
        ge=1,
        le=100_000,
        description="Maximum ended batches of one API key that are kept; the oldest are deleted "
        "first.",
    )
    retention_s: float = Field(
        default=30.0 * DAY_S,
        ge=HOUR_S,
        le=3_650.0 * DAY_S,
        description="How long a file is kept if its client does not state it, and a batch after "
        "its end, seconds.",
    )
    max_running: int = Field(
        default=4, ge=1, le=256, description="Maximum batches that one router replica runs at once."
    )
    max_lines_in_flight: int = Field(
        default=32,
        ge=1,
        le=4_096,
        description="Maximum lines in flight in one router replica.",
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
        description="Maximum uploads into one router replica at once; further ones get 503. If "
        "there are API keys, each may have at most half of them; further ones get 429.",
    )
    upload_timeout_s: float = Field(
        default=600.0, ge=1, le=86_400, description="Timeout of one upload, seconds."
    )
    poll_s: float = Field(
        default=2.0,
        ge=0.01,
        le=3_600,
        description="Interval at which a router replica looks for batches that no router runs, "
        "seconds.",
    )

    @field_validator("directory")
    @classmethod
    def _check_directory(cls, value: Path | None) -> Path | None:
        # Processes of the application have different working directories.
        if value is not None and not value.is_absolute():
            raise ValueError("batches.directory must be an absolute path")
        return value

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not _BUCKET.fullmatch(value):
            raise ValueError(
                "batches.url must look like s3://bucket/prefix or gs://bucket/prefix, without "
                "credentials"
            )
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
