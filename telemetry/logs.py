"""Log lines with the request that they belong to, as text or JSON, and no flood of repetitions."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Configuration of logs and traces. Metrics are always on and need none.


class TracingConfig(BaseModel):
    """OpenTelemetry spans of each request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="Full URL at which an OpenTelemetry collector accepts OTLP over HTTP, such as "
        "`http://collector:4318/v1/traces`; needs the extra `otel`. Headers that the collector "
        "needs, such as an `authorization`, come from the nodes' environment, as "
        "`OTEL_EXPORTER_OTLP_HEADERS`. Null: no spans.",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, among requests whose client does not "
        "decide it.",
    )
    trust_client: bool = Field(
        default=True,
        description="A request with a `traceparent` header continues the client's trace, and the "
        "client decides whether it is sampled. False: every request begins a trace of its own.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://collector:4318/v1/traces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must hold no user or password: use OTEL_EXPORTER_OTLP_HEADERS")
        return value


class LogsConfig(BaseModel):
    """The lines that routers and replicas log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["text", "json"] = Field(
        default="text", description="A line of text, or of one JSON object."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    requests: Literal["all", "failed", "none"] = Field(
        default="all",
        description="Requests that get a line at their end: all, those that failed or were "
        "refused, or none.",
    )
    directory: Path | None = Field(
        default=None,
        description="Folder for a file of each process, at most 64 MiB each, oldest lines out. "
        "Null: standard error, which Ray keeps with its own logs.",
    )


class TelemetryConfig(BaseModel):
    """Log lines and traces of each request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tracing: TracingConfig = Field(
        default_factory=TracingConfig, description="Spans of each request, for OpenTelemetry."
    )
    logs: LogsConfig = Field(default_factory=LogsConfig, description="Log lines.")


PACKAGES = ("sluice", "opentelemetry")  # whose loggers are set up
MAX_FILE_BYTES = 16 << 20
MAX_OLD_FILES = 3

REPEATS = 10  # most warnings from one place in the code within REPEAT_PERIOD_S
REPEAT_PERIOD_S = 10.0

_MAX_PLACES = 1_000
REQUEST_ID: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""Of the request that the current task serves: every line that is logged carries it."""

_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that end a line, are invisible, turn the text's direction, or cannot be encoded."""

_BARE = re.compile(r"[!#-<>-\[\]-~]+")
"""Values that need no quotes: ASCII without space, ``"``, ``=`` and backslash."""


@contextmanager
def of_request(request_id: str) -> Iterator[None]:
    """Every line that is logged inside, also by tasks started there, carries this request id."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def configure_logs(config: LogsConfig, process: str) -> None:
    """Log what this process does as ``config`` says, in place of an earlier set-up. ``process``
    names it in each line, and its file. Raises OSError."""
    # Not `sys.stderr`: Serve puts a buffer of a thousand lines of its own log in its place.
    handler: logging.Handler = logging.StreamHandler(sys.__stderr__)
    if config.directory is not None:
        folder = config.directory.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(
            folder / f"{process}.log",
            maxBytes=MAX_FILE_BYTES,
            backupCount=MAX_OLD_FILES,
            encoding="utf-8",
        )
    handler.setFormatter(JsonLines(process) if config.format == "json" else TextLines(process))
    handler.addFilter(RepeatLimit())
    for name in PACKAGES:
        logger = logging.getLogger(name)
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(config.level.upper())
        logger.propagate = False


class RepeatLimit(logging.Filter):
    """Lets one place in the code warn ``REPEATS`` times in ``REPEAT_PERIOD_S``; the next
    period's first line says how many were left out. Lines below a warning, and those with fields
    of a request, always pass. ``O(1)``, and bounded in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written."""
        # Lines about a request are logged for every request.
        if record.levelno < logging.WARNING or hasattr(record, "fields"):
            return True
        place = (record.pathname, record.lineno)
        now_s = self._clock()
        began_s, seen = self._places.get(place, (now_s, 0))
        if now_s - began_s >= REPEAT_PERIOD_S:
            if seen > REPEATS:
                record.msg = f"{record.getMessage()} ({seen - REPEATS} such lines were left out)"
                record.args = None
            began_s, seen = now_s, 0
        if place not in self._places and len(self._places) >= _MAX_PLACES:
            self._places.clear()
        self._places[place] = (began_s, seen + 1)
        return seen < REPEATS


class _Lines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._second, self._date = -1, ""

    def time(self, record: logging.LogRecord) -> str:
        """When it was made, UTC, to the millisecond."""
        second, rest = divmod(int(record.created * 1000), 1000)
        if second != self._second:  # a busy process writes many lines in one
            self._second = second
            self._date = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        return f"{self._date}.{rest:03d}Z"

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """The request's id, and what a caller gave as ``extra={"fields": {...}}``."""
        request_id, own = REQUEST_ID.get(), getattr(record, "fields", None)
        fields: dict[str, object] = {"request_id": request_id} if request_id else {}
        return fields | dict(own) if isinstance(own, Mapping) else fields

    def exception(self, record: logging.LogRecord) -> str:
        """The traceback, or nothing."""
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonLines(_Lines):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        parts: dict[str, object] = {
            "time": self.time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        parts |= self.fields(record)
        if exception := self.exception(record):
            parts["exception"] = exception
        return json.dumps(parts, default=str, separators=(",", ":"))


class TextLines(_Lines):
    """Time, level, process, logger, request, message and ``name=value`` fields on one line (JSON
    strings for values that are not one word); a traceback on indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of ``record``."""
        fields = self.fields(record).items()
        named = " ".join([f"{name}={_quoted(value)}" for name, value in fields])
        head = f"{self.time(record)} {record.levelname.lower()} {self._process} {record.name}"
        line = f"{head}: {record.getMessage()}"
        line = f"{line} {named}" if named else line
        if not (line.isascii() and line.isprintable()):
            line = _CONTROL.sub(_escaped, line)
        if not record.exc_info:
            return line
        # Indented, as the message of an exception may hold a line that looks like one of ours.
        traceback = (_CONTROL.sub(_escaped, each) for each in self.exception(record).split("\n"))
        return line + "".join(f"\n  {each}" for each in traceback if each)


def _quoted(value: object) -> str:
    """``value`` as one word or in quotes, so that it cannot look like further fields."""
    text = str(value)
    if isinstance(value, (int, float)) or _BARE.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _escaped(found: re.Match[str]) -> str:
    """Escape a control character: text from a client must not look like a separate log line."""
    return found[0].encode("unicode_escape").decode("ascii")
