"""A real Prometheus beside a soak: its counters must match the clients' counts.

Counters must never fall, and in the end equal the clients' own counts exactly.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from sluice.benchmarks.live.replay.client import End, Outcome
from sluice.benchmarks.live.replay.kinds import Kind
from sluice.benchmarks.live.soak.batches import LINE_TOKENS
from sluice.deploy.ray_settings import free_port

PROGRAM: Final = "prometheus"
SCRAPE_S: Final = 5.0

_JOB = "sluice"
_READY_S = 60.0
_CALL_S = 10.0
_POLL_S = 0.5
_FRESH_S = 3.0
"""After this idle time all processes have pushed and no router serves an older page, seconds."""

_COUNTED = ("_total", "_count", "_sum", "_bucket")


class Count(NamedTuple):
    """A value in Prometheus, and its bounds by the clients' own counts.

    For a request whose client disconnected early, the client knows neither whether it was served to
    its end nor how many tokens were sent: ``most`` counts it whole, ``least`` as far as is known.
    """

    what: str
    scraped: float
    least: float
    most: float

    @property
    def differs(self) -> bool:
        """Whether the value is outside its bounds."""
        return not self.least <= self.scraped <= self.most


class Scraper:
    """A Prometheus that scrapes an application. Use :func:`scraping`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._started_s = time.time()

    def wait_until_ready(self) -> None:
        """Return once Prometheus answers.

        Raises:
            TimeoutError: it does not answer in time.
        """
        self._wait(lambda: self._ask("/-/ready") is not None, "it does not start")

    def wait_until_fresh(self) -> None:
        """Return once it has scraped the current state of the page.

        Raises:
            TimeoutError: it has stopped scraping.
        """
        since_s = time.time() + _FRESH_S
        query = f'min(timestamp(sluice_controller_up{{job="{_JOB}"}}))'
        self._wait(lambda: self.value(query) >= since_s, "it has stopped scraping")

    def value(self, query: str) -> float:
        """The result of ``query``; 0 without a result."""
        found = self._query(query)
        return float(found[0]["value"][1]) if found else 0.0

    def by(self, label: str, query: str) -> dict[str, float]:
        """The results of ``query``, by a label."""
        return {
            each["metric"].get(label, ""): float(each["value"][1]) for each in self._query(query)
        }

    def falls(self) -> dict[str, int]:
        """How often each counter fell, by name; counters that never fell are left out."""
        text = self._ask("/api/v1/label/__name__/values") or '{"data": []}'
        names = [name for name in json.loads(text)["data"] if name.endswith(_COUNTED)]
        over = f'{{job="{_JOB}"}}[{ceil(time.time() - self._started_s) + 1}s]'
        found = {name: int(self.value(f"sum(resets({name}{over}))")) for name in names}
        return {name: count for name, count in found.items() if count}

    def _query(self, query: str) -> list[dict[str, Any]]:
        text = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        if text is None:
            return []
        found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
        return found

    def _ask(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(self._address + path, timeout=_CALL_S) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def _wait(self, condition: Any, otherwise: str) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Prometheus at {self._address}: {otherwise}")
            time.sleep(_POLL_S)


@contextmanager
def scraping(url: str, folder: Path, every_s: float) -> Iterator[Scraper]:
    """A Prometheus that scrapes the application at ``url``, with its data under ``folder``.

    Raises:
        FileNotFoundError: :data:`PROGRAM` is not on the path.
        TimeoutError: it does not start.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise FileNotFoundError(f"{PROGRAM} is not on the path")
    interval = f"{max(1, round(every_s))}s"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [
            {
                "job_name": _JOB,
                "static_configs": [{"targets": [url.partition("://")[2]]}],
            }
        ],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            scraper = Scraper(f"http://{address}")
            scraper.wait_until_ready()
            yield scraper
        finally:
            process.terminate()
            process.wait()


def comparison(
    scraper: Scraper, outcomes: Sequence[Outcome], kinds: Sequence[Kind], lines: Mapping[str, int]
) -> dict[str, Any]:
    """Prometheus's values beside the clients' counts, as plain data.

    Call it once no request is running. Without faults: a killed router loses the counts that it has
    not pushed.

    Args:
        kinds: of each outcome.
        lines: number of batch lines by how they ended.

    Raises:
        TimeoutError: Prometheus has stopped scraping.
    """
    scraper.wait_until_fresh()
    requests = scraper.by(
        "outcome",
        'sum by (outcome) (sluice_requests_total{endpoint=~"chat|completions"})',
    )
    tokens = scraper.value('sum(sluice_tokens_total{type="generated"})')
    counts = expected(requests, tokens, outcomes, kinds, lines)
    return {
        "falls": scraper.falls(),
        "counts": [{**count._asdict(), "differs": count.differs} for count in counts],
    }


def expected(
    requests: Mapping[str, float],
    tokens: float,
    outcomes: Sequence[Outcome],
    kinds: Sequence[Kind],
    lines: Mapping[str, int],
) -> list[Count]:
    """The scraped requests by outcome, and generated tokens, with their bounds."""
    ended = dict.fromkeys(End, 0)
    known = left = 0
    for outcome, kind in zip(outcomes, kinds, strict=True):
        ended[outcome.end] += 1
        made = outcome.output_tokens * kind.fields.get("n", 1)
        if outcome.end is End.ANSWERED:
            known += made
        else:
            left += made
    answered, failed = lines.get("answered", 0), lines.get("failed", 0)
    whole = ended[End.ANSWERED] + answered
    known += answered * LINE_TOKENS
    found = {name: requests.get(name, 0.0) for name in ("ok", "cancelled", "failed")}
    refused = requests.get("refused", 0.0) + requests.get("client_error", 0.0)
    sent = len(outcomes) + answered + failed
    gone = ended[End.LEFT]
    return [
        Count("requests", sum(requests.values()), sent, sent),
        Count("ok", found["ok"], whole, whole + gone),
        Count("ok or cancelled", found["ok"] + found["cancelled"], whole + gone, whole + gone),
        Count("refused", refused, ended[End.REFUSED], ended[End.REFUSED] + failed),
        Count("failed", found["failed"], ended[End.FAILED], ended[End.FAILED] + failed),
        Count("generated tokens", tokens, known, known + left + failed * LINE_TOKENS),
    ]


def agrees(found: Mapping[str, Any] | None) -> bool:
    """Whether no counter fell and all match the clients' counts; also true without Prometheus."""
    return found is None or not (
        found["falls"] or any(count["differs"] for count in found["counts"])
    )
