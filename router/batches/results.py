"""The results of a batch while it runs: two logs that become its result files as they are."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sluice.router.batches.disk import open_private, write_all
from sluice.router.batches.lines import BatchRequest


class Reply(NamedTuple):
    """The reply to a line.

    Attributes:
        status: HTTP status. request_id: our id of the attempt. body: of the response, JSON.
        no_room: it was not served for lack of capacity, and may be tried again.
        clamped: what the client's caps changed in its objective, and to what, by field.
        final: it failed, and must not be tried again.
    """

    status: int
    request_id: str
    body: bytes
    no_room: bool = False
    clamped: Mapping[str, str] = MappingProxyType({})
    final: bool = False


class Result(NamedTuple):
    """The written result of a line: ``text`` with its line feed, for the results or, if not ``ok``,
    for the errors."""

    custom_id: str
    ok: bool
    text: bytes


def answered(line: BatchRequest, reply: Reply) -> Result:
    """The result of a line with a reply, which may be an error. ``O(len(reply.body))``."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        return not_run(line, "invalid_response", "The response of the engine was not JSON.")
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    if reply.clamped:
        response["clamped"] = dict(reply.clamped)
    return _result(line, reply.status < 400, {"response": response, "error": None})


def not_run(line: BatchRequest, code: str, message: str) -> Result:
    """The result of a line that has no response."""
    return _result(line, False, {"response": None, "error": {"code": code, "message": message}})


def _result(line: BatchRequest, ok: bool, fields: dict[str, Any]) -> Result:
    entry = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, **fields}
    # Escaped, as an answer may hold half of a surrogate pair, which has no bytes of its own.
    return Result(line.custom_id, ok, json.dumps(entry, separators=(",", ":")).encode() + b"\n")


class ResultLog:
    """Both logs, and which lines are in them. One line of the input has one result, in one of them.

    Opening reads what an earlier owner has written. A last line that is not whole is cut off: its
    request runs again.

    All methods block on the disk; they may be called from any thread.

    Raises:
        OSError: a log cannot be read or made.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._logs = {True: _Log(output, self._done), False: _Log(errors, self._done)}

    @property
    def completed(self) -> int:
        """Lines that the engines answered."""
        return self._logs[True].lines

    @property
    def failed(self) -> int:
        """Lines that ended in any other way."""
        return self._logs[False].lines

    def has(self, custom_id: str) -> bool:
        """Whether that line has its result."""
        return custom_id in self._done

    def add(self, result: Result) -> None:
        """Append a result. One for a line that has its own is dropped.

        Raises:
            OSError: it could not be written; nothing of it is kept.
        """
        with self._lock:
            if result.custom_id not in self._done:
                self._logs[result.ok].append(result.text)
                self._done.add(result.custom_id)

    def sync(self) -> None:
        """Flush added results to disk, so that they survive a power failure."""
        with self._lock:
            for log in self._logs.values():
                os.fsync(log.file)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            for log in self._logs.values():
                log.file.close()


class _Log:
    """One file. ``lines`` and ``size`` count what is whole in it."""

    def __init__(self, path: Path, done: set[str]) -> None:
        self.lines = 0
        self.size = 0
        self.file = open_private(path, "ab")
        with path.open("rb") as written:
            for raw in written:
                custom_id = _custom_id(raw)
                if custom_id is None:
                    break
                done.add(custom_id)
                self.lines += 1
                self.size += len(raw)
        self.file.truncate(self.size)

    def append(self, text: bytes) -> None:
        try:
            write_all(self.file, text)
        except OSError:
            self.file.truncate(self.size)
            raise
        self.lines += 1
        self.size += len(text)


def _custom_id(raw: bytes) -> str | None:
    """The id in a line of a log, or ``None`` where the line is not whole."""
    if not raw.endswith(b"\n"):
        return None
    try:
        custom_id = json.loads(raw)["custom_id"]
    except (ValueError, TypeError, KeyError):
        return None
    return custom_id if isinstance(custom_id, str) else None
