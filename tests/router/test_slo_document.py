"""What docs/slo.md says of admission, caps and errors is what happens."""

from __future__ import annotations

import json
import re

import yaml

from sluice.controller.client import LOOP_TIMEOUT_S
from sluice.deploy.config import parse_config
from sluice.router.config import RouterConfig
from sluice.router.dispatch.placement import ASKERS, MAX_PAUSE_S, MIN_PAUSE_S
from sluice.router.errors import RULES, Reason
from sluice.router.request.session import MAX_SESSION_CHARACTERS
from sluice.router.request.slo import SloReader
from sluice.router.wire import MAX_OBJECTIVE_MS
from sluice.scheduling.request.loops import KEPT_S, MOST_LOOPS
from sluice.scheduling.request.objective import TPOTAnchor
from sluice.scheduling.request.stages import MOST_STAGES, Stage
from tests.documents import ROOT, marked, section
from tests.router.far_side import Edge, FarSide, serve

PAGE = ROOT / "docs" / "slo.md"


def test_every_error_is_documented_with_its_status() -> None:
    text = section(PAGE, "What comes back")
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", text, re.MULTILINE)
    documented = {
        Reason(code): int(status)
        for status, codes in rows
        for code in re.findall(r"`(\w+)`", codes)
    }
    rules = {reason: rule.status for reason, rule in RULES.items()}
    # This one stands in a stream that has its status already.
    del rules[Reason.STREAM_BROKEN]
    assert documented == rules


def test_the_classes_of_the_example_do_what_they_are_said_to() -> None:
    (text,) = marked(PAGE, "check: config")
    classes = parse_config(yaml.safe_load(text)).router.classes
    assert {name: entry.when_unattainable for name, entry in classes.items()} == {
        "chat": "best_effort",
        "agent": "reject",
        "report": "queue",
    }


def test_the_classes_of_the_example_state_each_anchor() -> None:
    (text,) = marked(PAGE, "check: anchors")
    classes = parse_config(yaml.safe_load(text)).router.classes
    anchors = {name: entry.tpot_anchor.value for name, entry in classes.items()}
    assert anchors == {"chat": "running_max", "speech": "window", "report": "mean"}
    rows = re.findall(r"^\| `(\w+)`", section(PAGE, "How TPOT is measured"), re.MULTILINE)
    assert rows == ["tpot_anchor", *(anchor.value for anchor in TPOTAnchor)]


def test_the_example_of_stages_is_read_as_it_says() -> None:
    (text,) = marked(PAGE, "check: stages")
    slo = SloReader(RouterConfig()).read(json.loads(text), []).slo
    assert slo.stages == (
        Stage(2.0, 0.1),
        Stage(0.5, 0.05, tokens=50),
        Stage(tpot_s=0.2),
    )
    assert slo.times_s == (2.0, 0.05, None), "its first TTFT and its tightest TPOT"
    assert f"at most {MOST_STAGES}" in section(PAGE, "Stages")


def test_the_example_of_a_loop_is_read_as_it_says() -> None:
    (text,) = marked(PAGE, "check: loop")
    found = SloReader(RouterConfig()).read(json.loads(text), [])
    assert found.loop == ("fix-42", 60_000)
    words = " ".join(section(PAGE, "Tool loops").split())
    assert f"1 to {MAX_SESSION_CHARACTERS} characters" in words
    assert f"at most {MOST_LOOPS:,} of them" in words
    assert KEPT_S == MAX_OBJECTIVE_MS / 1000 == 86_400, "a day"
    assert f"at most {LOOP_TIMEOUT_S * 1000:g} ms" in words


async def test_the_example_of_caps_is_answered_as_it_says() -> None:
    (config,) = marked(PAGE, "check: capped")
    (request,) = marked(PAGE, "check: capped request")
    (headers,) = marked(PAGE, "check: capped headers")
    edge = Edge(FarSide(a=serve), config=parse_config(yaml.safe_load(config)).router)
    async with edge.client() as client:
        response = await client.post(
            "/v1/chat/completions",
            json=json.loads(request),
            headers={"authorization": "Bearer change-me"},
        )
    assert response.status_code == 200
    for line in headers.splitlines():
        name, _, value = line.partition(": ")
        assert response.headers[name] == value


def test_the_figures_of_the_line_are_the_codes() -> None:
    text = section(PAGE, "Where no replica can promise")
    assert ASKERS == 4
    assert "first four" in text
    assert f"{MIN_PAUSE_S * 1000:.0f} ms to {MAX_PAUSE_S:.0f} s" in text
