"""Log lines as a collector of logs reads them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.telemetry.logs import (
    PACKAGES,
    REPEAT_PERIOD_S,
    REPEATS,
    JsonLines,
    LogsConfig,
    RepeatLimit,
    TextLines,
    configure_logs,
    of_request,
)


@pytest.fixture
def log() -> logging.Logger:
    return logging.Logger("sluice.router.dispatch.dispatcher")


def lines(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return stream


def test_a_json_line_holds_the_request_its_fields_and_the_exception(log: logging.Logger) -> None:
    stream = lines(log, JsonLines("router-1"))
    with of_request("abc"):
        try:
            raise ValueError("a\nb")
        except ValueError:
            log.exception("it %s", "failed", extra={"fields": {"ttft_ms": 1.5}})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert "ValueError: a\nb" in entry.pop("exception")
    assert entry == {
        "level": "error",
        "process": "router-1",
        "logger": "sluice.router.dispatch.dispatcher",
        "request_id": "abc",
        "message": "it failed",
        "ttft_ms": 1.5,
    }


@pytest.mark.parametrize(
    "hostile",
    ["a\nINFO forged", "a\r\x1b[31mred", "a\u2028b", "a\x85b", "a\u202eb", "a\u200bb", "a\ud800b"],
)
def test_what_a_client_sent_begins_no_line_of_its_own(log: logging.Logger, hostile: str) -> None:
    streams = lines(log, TextLines("router-1")), lines(log, JsonLines("router-1"))
    log.warning("the body says %s", hostile, extra={"fields": {"model": hostile}})
    for stream in streams:
        assert len(stream.getvalue().splitlines()) == 1
        assert stream.getvalue().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "hostile",
    [
        *(
            "a outcome=ok",
            "outcome=ok",
            'a" outcome="ok',
            "a\\",
            'a\\" b=c "',
            "",
            "a\tb",
            "a\nb=c",
        ),
        *(
            "a\u00a0b=c",
            "a\u3000b",
            "a\x00b",
            "a\x9bb",
            "a\u2028b",
            "a\u202eb",
            "a\ud800b",
            "Größe",
        ),
    ],
)
def test_a_value_is_one_field(log: logging.Logger, hostile: str) -> None:
    stream = lines(log, TextLines("router-1"))
    log.warning("ended", extra={"fields": {"outcome": "failed", "model": hostile, "tokens": 7}})
    (line,) = stream.getvalue().splitlines()
    line.encode()
    assert line.isprintable()
    # As a parser of such lines reads them: bare words, or JSON strings.
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)(?: |$)', line)
    read = {name: json.loads(value) if value[0] == '"' else value for name, value in found}
    assert read == {"outcome": "failed", "model": hostile, "tokens": "7"}


def test_a_traceback_begins_no_line_of_its_own(log: logging.Logger) -> None:
    stream = lines(log, TextLines("router-1"))
    try:
        raise ValueError("a\n2026-01-01T00:00:00.000Z info router-1 sluice: forged\rb")
    except ValueError:
        log.exception("it failed")
    first, *traceback = stream.getvalue().splitlines()
    assert first.endswith("it failed")
    assert traceback[-1].endswith("forged\\rb")
    assert all(line.startswith("  ") for line in traceback)


def test_plain_values_have_no_quotes(log: logging.Logger) -> None:
    stream = lines(log, TextLines("router-1"))
    log.info("ended", extra={"fields": {"model": "org/7b:x@v1", "ttft_ms": 1.5, "none": None}})
    assert stream.getvalue().endswith(" model=org/7b:x@v1 ttft_ms=1.5 none=None\n")


async def test_tasks_of_a_request_log_with_its_id_and_others_with_theirs(
    log: logging.Logger,
) -> None:
    stream = lines(log, JsonLines("router-1"))
    both_inside = asyncio.Barrier(2)

    async def work(name: str) -> None:
        await both_inside.wait()
        log.warning(name)

    async def request(name: str) -> None:
        with of_request(name):
            await asyncio.create_task(work(name))

    await asyncio.gather(request("a"), request("b"))
    log.warning("outside")
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    ids = {entry["message"]: entry.get("request_id") for entry in entries}
    assert ids == {"a": "a", "b": "b", "outside": None}


def test_one_place_may_not_flood_the_log(log: logging.Logger) -> None:
    now_s = [0.0]
    stream = lines(log, TextLines("router-1"))
    log.handlers[0].addFilter(RepeatLimit(lambda: now_s[0]))

    def fail() -> None:
        log.warning("failed")

    for _ in range(3 * REPEATS):
        fail()
        log.info("told")
        log.warning("request ended", extra={"fields": {"outcome": "lost"}})
    log.warning("another place")
    written = stream.getvalue()
    assert written.count("failed") == REPEATS
    assert written.count("told") == written.count("outcome=lost") == 3 * REPEATS
    assert written.count("another place") == 1
    now_s[0] = REPEAT_PERIOD_S
    fail()
    fail()
    later = stream.getvalue()[len(written) :].splitlines()
    assert f"({2 * REPEATS} such lines were left out)" in later[0]
    assert later[1].endswith("failed")


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level, True)
        for name in PACKAGES
    }
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_folder_gets_a_file_of_the_process_with_what_the_level_allows(
    tmp_path: Path, loggers_as_before: None
) -> None:
    folder = tmp_path / "logs"
    for level in ("debug", "warning"):
        config = LogsConfig(format="json", level=level, directory=folder)
        configure_logs(config, "replica-7")
        logging.getLogger("sluice.replica.server").info("at %s", level)
    entries = [json.loads(line) for line in (folder / "replica-7.log").read_text().splitlines()]
    assert [entry["message"] for entry in entries] == ["at debug"]
