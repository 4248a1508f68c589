"""Public traces of LLM services, by path, as workloads without objectives.

The format is recognised by its columns. Times count from the first kept request; requests without
prompt or output tokens are left out.

==================  =====================================================================
Azure 2023, 2024    CSV of ``TIMESTAMP,ContextTokens,GeneratedTokens``; ISO times.
BurstGPT            CSV of ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log
                    Type``; seconds. A failed call has 0 response tokens.
Mooncake            JSON lines of ``timestamp,input_length,output_length,hash_ids``;
                    milliseconds, blocks of 512 tokens.
Qwen-Bailian        JSON lines of ``chat_id,parent_chat_id,timestamp,input_length,output_length,
                    type,turn,hash_ids``; seconds, blocks of 16 tokens.
==================  ====================================================================="""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import IO, Any

from sluice.scheduling.request.objective import SLO
from sluice.simulation.workload import Arrival, Workload

MAX_REQUESTS = 200_000
"""Requests read where the caller sets no limit; the whole Azure trace of 2024 has 44 million."""

_MAX_LINE = 4 * 2**20
"""Longest line, characters: the hashes of a prompt of some million tokens."""

_MAX_TOKENS = 10_000_000
"""A length above this is taken for a column that is something else."""


class TraceError(ValueError):
    """A trace cannot be read. The message names the file, the line and what is allowed."""


@dataclass(frozen=True, slots=True)
class _Format:
    """A published format; ``marks`` tell it from one with the same columns."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]
    task: str = ""
    hashes: str = ""
    marks: tuple[str, ...] = ()
    block_tokens: int = 512

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.time, self.prompt, self.output, self.task, self.hashes, *self.marks)
        return tuple(column for column in named if column)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not isfinite(number):
        raise ValueError
    return number


def _iso_seconds(value: Any) -> float:
    """Seconds since 1970 of an ISO time; one without an offset is read as UTC."""
    if not isinstance(value, str):
        raise ValueError
    moment = datetime.fromisoformat(value.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(value: Any) -> float:
    return _number(value) / 1e3


_FORMATS = (
    _Format(
        "Azure LLM inference trace", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _iso_seconds
    ),
    _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number, task="Log Type"),
    _Format(
        "Qwen-Bailian trace",
        "timestamp",
        "input_length",
        "output_length",
        _number,
        task="type",
        hashes="hash_ids",
        marks=("chat_id",),
        block_tokens=16,
    ),
    _Format(
        "Mooncake trace",
        "timestamp",
        "input_length",
        "output_length",
        _milliseconds,
        hashes="hash_ids",
    ),
)


def load(path: str | Path, slo: SLO | None = None, limit: int = MAX_REQUESTS) -> Workload:
    """The trace in the file ``path``, its first ``limit`` requests, read line by line. Raises
    :class:`TraceError`, which names what is wrong and where."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            return _load(file, stream, slo or SLO(), limit)
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: is not UTF-8 text: {error.reason}") from error


def trace_files(folder: Path) -> list[Path]:
    """The traces of a folder by name; raises :class:`TraceError` if there are none."""
    found = sorted(each for each in folder.iterdir() if each.suffix in (".csv", ".jsonl"))
    if not found:
        raise TraceError(f"{folder}: has no .csv or .jsonl file")
    return found


def _load(file: Path, stream: IO[str], slo: SLO, limit: int) -> Workload:
    arrivals: list[Arrival] = []
    interned: dict[int, int] = {}  # A number that occurs in many prompts is kept once.
    layout: _Format | None = None
    start_s = before_s = -inf
    skipped = 0
    cut = ""
    for line, record in _records(file, stream):
        if layout is None:
            layout = _recognised(file, record)
        if len(arrivals) == limit:
            cut = f"; cut after {limit}"
            break
        entry = _Entry(f"{file}:{line}", record)
        at_s = entry.seconds(layout.time, layout.seconds)
        if at_s < before_s:
            raise entry.error(
                layout.time, "a time that is not before that of the request above; sort the file"
            )
        before_s = at_s
        prompt, output = entry.tokens(layout.prompt), entry.tokens(layout.output)
        if not (prompt and output):
            skipped += 1
            continue
        if not arrivals:
            start_s = at_s
        task = entry.text(layout.task) if layout.task else ""
        hashes: tuple[int, ...] = ()
        if layout.hashes:
            hashes = entry.hashes(layout.hashes, -(-prompt // layout.block_tokens), interned)
        arrivals.append(Arrival(at_s - start_s, prompt, output, slo, task, hashes))
    if layout is None:
        raise TraceError(f"{file}: has no requests")
    if not arrivals:
        raise TraceError(f"{file}: all of its {skipped} requests have no prompt or no output")
    left_out = f"; left out {skipped} without prompt or output" if skipped else ""
    return Workload(
        file.stem,
        tuple(arrivals),
        layout.block_tokens,
        description=f"{layout.name}, {file.name}, {len(arrivals)} requests{cut}{left_out}.",
    )


def _records(file: Path, stream: IO[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and columns of each request, from JSON lines or from CSV with a header. No line
    is held whole beyond the limit."""
    header: list[str] | None = None  # of JSON lines it is empty
    number = 0
    while text := stream.readline(_MAX_LINE + 1):
        number += 1
        if len(text) > _MAX_LINE:
            raise TraceError(f"{file}:{number}: line longer than {_MAX_LINE} characters")
        if not text.strip():
            continue
        if header is None and not text.lstrip().startswith("{"):
            header = [name.strip() for name in _cells(file, number, text)]
            _recognised(file, dict.fromkeys(header))
            continue
        header = header or []
        yield number, _csv(file, number, text, header) if header else _json(file, number, text)
    if header is None:
        raise TraceError(f"{file}: is empty")


def _json(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}:{number}: is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceError(f"{file}:{number}: must be a JSON object, got {_shown(record)}")
    return record


def _csv(file: Path, number: int, text: str, header: list[str]) -> dict[str, Any]:
    cells = _cells(file, number, text)
    if len(cells) != len(header):
        raise TraceError(f"{file}:{number}: has {len(cells)} columns, the header has {len(header)}")
    return dict(zip(header, cells, strict=True))


def _cells(file: Path, number: int, text: str) -> list[str]:
    """The cells of one line; none of the formats has a cell of several lines."""
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise TraceError(f"{file}:{number}: is not CSV: {error}") from error


def _recognised(file: Path, record: Mapping[str, Any]) -> _Format:
    for layout in _FORMATS:
        if not _missing(layout, record):
            return layout
    allowed = "; ".join(f"{layout.name}: {', '.join(layout.columns)}" for layout in _FORMATS)
    nearest = min(_FORMATS, key=lambda layout: len(_missing(layout, record)))
    missing = _missing(nearest, record)
    hint = ""
    if len(missing) < len(nearest.columns):
        hint = f" For {nearest.name} it lacks {', '.join(missing)}."
    found = ", ".join(_shown(column) for column in list(record)[:20])
    raise TraceError(f"{file}: has the columns {found}.{hint} A trace has one of: {allowed}")


def _missing(layout: _Format, record: Mapping[str, Any]) -> list[str]:
    return [column for column in layout.columns if column not in record]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One request's columns, read with errors that name the place."""

    place: str
    record: Mapping[str, Any]

    def error(self, column: str, allowed: str) -> TraceError:
        found = _shown(self.record[column]) if column in self.record else "nothing"
        return TraceError(f"{self.place}: {column} is {found}; allowed is {allowed}")

    def seconds(self, column: str, read: Callable[[Any], float]) -> float:
        try:
            return read(self.record[column])
        except (KeyError, ValueError, OverflowError) as error:
            allowed = "an ISO date and time" if read is _iso_seconds else "a number"
            raise self.error(column, allowed) from error

    def tokens(self, column: str) -> int:
        value = self.record.get(column)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
            value = int(value)
        if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
            raise self.error(column, f"a whole number from 0 to {_MAX_TOKENS}")
        return value

    def text(self, column: str) -> str:
        value = self.record.get(column)
        if not isinstance(value, str) or len(value) > 64:
            raise self.error(column, "a text of 64 characters at most")
        return value

    def hashes(self, column: str, blocks: int, interned: dict[int, int]) -> tuple[int, ...]:
        value = self.record.get(column)
        if not isinstance(value, list) or any(type(block) is not int for block in value):
            raise self.error(column, "a list of whole numbers")
        if len(value) != blocks:
            # Hashes of blocks of another size would be read as other prefixes.
            raise self.error(
                column, f"one number for each block of the prompt, {blocks} and not {len(value)}"
            )
        return tuple(interned.setdefault(block, block) for block in value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
