from __future__ import annotations

import re

import pytest

from sluice.router.config import RouterConfig
from sluice.router.metrics.instruments import MAX_NAMES
from sluice.router.request.prompt import CHARACTERS_PER_TOKEN, UNSTATED_OUTPUT_TOKENS
from sluice.router.tenancy.auth import POLL_S, WEAK_CHARACTERS, ApiKey, client_of, parse_keys
from sluice.router.tenancy.limits import EXCHANGE_S, Client, RateLimiter, TenantLimits
from sluice.router.tenancy.tokens import (
    LEEWAY_S,
    MAX_BYTES,
    MAX_CACHED,
    MAX_KEYS,
    MAX_TOKEN_BYTES,
    MIN_PAUSE_S,
    MIN_RSA_BITS,
    REFRESH_S,
    REMEMBERED_S,
    STALE_S,
)
from tests.documents import ROOT, marked, section

PAGE = ROOT / "docs" / "security.md"
MODEL = ROOT / "SECURITY.md"

NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", MODEL.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_tests_that_hold_a_defence_exist(path: str, name: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {name or 'test_'}" in source


def test_every_defence_names_its_tests() -> None:
    table = section(MODEL, "What is defended, and how")
    rows = re.findall(r"^\| (?!threat|---)(.*) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    assert all("`tests/" in row.split(" | ")[2] for row in rows)


def test_the_examples_of_key_files_are_ones() -> None:
    text, shares = marked(PAGE, "check: key-file")
    weights = [client_of(entry).caps.weight for entry in parse_keys(shares.encode(), ())]
    assert weights == [1, 4]
    entries = parse_keys(text.encode(), RouterConfig().classes)
    assert [client_of(entry).name for entry in entries] == ["acme", "tests"]
    assert isinstance(entries[0], ApiKey) and entries[0].limits.tokens_per_minute == 300_000


def test_the_figures_are_those_of_the_code() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"again every {POLL_S:.0f} seconds" in text
    assert f"less than {WEAK_CHARACTERS} characters" in text
    assert f"{UNSTATED_OUTPUT_TOKENS} where nothing says how many" in text
    assert f"a token for each {CHARACTERS_PER_TOKEN} characters" in text
    assert EXCHANGE_S == 1 and "through the controller once a second" in text
    assert TenantLimits().burst_s == 60 and "a minute's by default" in text


def test_the_figures_of_tokens_are_those_of_the_code() -> None:
    text = " ".join(section(PAGE, "Tokens").split())
    assert f"at most {MAX_TOKEN_BYTES >> 10} KiB" in text
    assert f"tolerance of {LEEWAY_S:g} s" in text
    assert f"every {REFRESH_S / 60:g} min" in text
    assert f"until they are {STALE_S / 3_600:g} h old" in text
    assert f"at most every {MIN_PAUSE_S:g} s" in text
    assert f"({MAX_BYTES >> 10} KiB, {MAX_KEYS} keys" in text
    assert f"RSA keys need {MIN_RSA_BITS:,} bits" in text
    assert f"the first {MAX_NAMES:,} names" in text and f"last {MAX_CACHED:,} accepted" in text
    assert REMEMBERED_S == 86_400 and "up to a day after its last token" in text


def test_the_headers_of_rate_limits_are_those_that_are_sent() -> None:
    documented = re.findall(r"`(x-ratelimit-[a-z-]+)`", section(PAGE, "Rate limits"))
    caps = TenantLimits(requests_per_minute=1, tokens_per_minute=1)
    sent = RateLimiter().headers(Client("a", "name-a", caps))
    assert sorted(documented) == sorted(name.decode() for name, _ in sent)
