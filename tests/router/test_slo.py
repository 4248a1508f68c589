"""The objective on the wire: precedence, and every way to get it wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from sluice.controller.client import LOOP_TIMEOUT_S
from sluice.deploy.config import parse_config
from sluice.protocol.requests import Endpoint
from sluice.router.config import LoopTerms, RouterConfig, ServiceClass
from sluice.router.errors import ApiError, Reason
from sluice.router.request.call import queue_ttl_s
from sluice.router.request.loop import StatedLoop
from sluice.router.request.session import MAX_SESSION_CHARACTERS
from sluice.router.request.slo import SloReader
from sluice.router.tenancy.limits import TenantLimits
from sluice.router.wire import MAX_OBJECTIVE_MS, SLO_HEADER_SETS
from sluice.scheduling.placement.loops import (
    KEPT_S,
    MAX_LOOPS,
    MEMORY,
    MIN_ENDED,
    MIN_PART,
    MIN_PROMISED,
)
from sluice.scheduling.request.objective import SLO, TPOTAnchor
from sluice.scheduling.request.stages import MAX_STAGES, Stage
from tests.documents import ROOT, marked, section
from tests.router.far_side import Edge, FarSide, serve

# Stages in a body: what they mean, and every way to get them wrong.

STAGES_READER = SloReader(
    RouterConfig(
        classes={"slow": ServiceClass(ttft_ms=5_000, tpot_ms=200, e2e_ms=60_000)},
        default_class="slow",
    )
)
END = {"until": "end", "tpot_ms": 50}
THINK = {"until": "reasoning_end", "ttft_ms": 500, "tpot_ms": 100}


def read_staged(stages: object, **others: object) -> SLO:
    return STAGES_READER.read({"slo": {"stages": stages, **others}}, []).slo


def refused_stages(stages: object, **others: object) -> str:
    with pytest.raises(ApiError) as caught:
        read_staged(stages, **others)
    assert caught.value.reason.status == 400
    return str(caught.value)


def test_stages_take_the_place_of_the_class_ttft_and_tpot() -> None:
    slo = read_staged([THINK, {"until": {"tokens": 20}, "e2e_ms": 2_000}, END], priority=3)
    stages = Stage(0.5, 0.1), Stage(e2e_s=2.0, tokens=20), Stage(tpot_s=0.05)
    assert slo == SLO.of_stages(stages, 60.0, 3, "slow")
    assert read_staged(None) == STAGES_READER.read({}, []).slo


def test_headers_are_overridden_and_the_whole_end_is_not() -> None:
    headers = [(b"x-slo-ttft-ms", b"7"), (b"x-slo-e2e-ms", b"9000")]
    slo = STAGES_READER.read({"slo": {"stages": [THINK, END]}}, headers).slo
    assert slo.times_s == (0.5, 0.05, 9.0)


@pytest.mark.parametrize("field", ["ttft_ms", "tpot_ms"])
def test_a_time_beside_the_stages_contradicts_them(field: str) -> None:
    assert f"slo.{field} and slo.stages contradict" in refused_stages([END], **{field: 5})
    assert read_staged([END], **{field: None}).tpot_s == 0.05


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "slo.stages must be a list of 1 to 8 stages, got an object"),
        ([], "slo.stages must be a list of 1 to 8 stages, got 0 of them"),
        ([END] * 9, "got 9 of them"),
        (["end"], "slo.stages[0] must be an object with until"),
        ([{}], "slo.stages[0].until must be"),
        ([THINK, {"until": "done"}], "slo.stages[1].until must be"),
        ([{"until": {"tokens": 0}}, END], "integer N from 1"),
        ([{"until": {"tokens": 2.5}}, END], "integer N from 1"),
        ([{"until": {"tokens": True}}, END], "integer N from 1"),
        ([{"until": {"words": 2}}, END], "integer N from 1"),
        ([{**END, "ttft_ms": 0}], "slo.stages[0].ttft_ms must be a number of milliseconds"),
        ([{**END, "tpot_ms": "5"}], "slo.stages[0].tpot_ms must be"),
        ([{**END, "e2e_ms": float("nan")}], "slo.stages[0].e2e_ms must be"),
        ([{**END, "priority": 3}], "slo.stages[0] has the unknown key 'priority'"),
        ([THINK], 'must have the until "end" in its last stage'),
        ([END, END], 'must have the until "end" in its last stage, and only there'),
        ([THINK, THINK, END], 'the until "reasoning_end" only once'),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(stages: Any, message: str) -> None:
    assert message in refused_stages(stages)


def test_each_stage_is_held_to_the_caps_of_its_key() -> None:
    caps = TenantLimits(min_ttft_ms=600, min_tpot_ms=80)
    found = STAGES_READER.read({"slo": {"stages": [THINK, END]}}, [], caps)
    assert found.slo.stages == (Stage(0.6, 0.1), Stage(tpot_s=0.08))
    assert found.clamped == {"ttft_ms": "600", "tpot_ms": "80"}
    strict = caps.model_copy(update={"beyond": "refuse"})
    with pytest.raises(ApiError, match=r"slo\.stages\[0\]\.ttft_ms must be at least 600 ms") as no:
        STAGES_READER.read({"slo": {"stages": [THINK, END]}}, [], strict)
    assert no.value.reason.status == 403


# What docs/slo.md says of admission, caps and errors is what happens.

PAGE = ROOT / "docs" / "slo.md"


def test_every_error_is_documented_with_its_status() -> None:
    text = section(PAGE, "What comes back")
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*) \|", text, re.MULTILINE)
    documented = {
        Reason(code): int(status)
        for status, codes in rows
        for code in re.findall(r"`(\w+)`", codes)
    }
    rules = {reason: reason.status for reason in Reason}
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
    (text,) = marked(PAGE, "check: anchors")
    anchored = parse_config(yaml.safe_load(text)).router.classes
    assert {entry.tpot_anchor for entry in anchored.values()} == set(TPOTAnchor)


def test_the_example_of_stages_is_read_as_it_says() -> None:
    (text,) = marked(PAGE, "check: stages")
    slo = SloReader(RouterConfig()).read(json.loads(text), []).slo
    assert slo.stages == (
        Stage(2.0, 0.1),
        Stage(0.5, 0.05, tokens=50),
        Stage(tpot_s=0.2),
    )
    assert slo.times_s == (2.0, 0.05, None), "its first TTFT and its tightest TPOT"
    assert f"at most {MAX_STAGES}" in section(PAGE, "Stages")


def test_the_example_of_a_loop_is_read_as_it_says() -> None:
    (text,) = marked(PAGE, "check: loop")
    found = SloReader(RouterConfig()).read(json.loads(text), [])
    assert found.loop == StatedLoop(id="fix-42", deadline_ms=60_000)
    headings = "Tool loops", "What a turn gets", "What is promised", "Limits of loops"
    words = " ".join(" ".join(section(PAGE, each) for each in headings).split())
    (config,) = marked(PAGE, "check: loops")
    entry = parse_config(yaml.safe_load(config)).router.classes["agent"]
    assert entry.loop == LoopTerms(deadline_ms=600_000, idle_ms=120_000)
    assert f"default {LoopTerms(deadline_ms=1).idle_ms / 1000:g} s" in words
    assert f"last {MEMORY} loops that ended, by class alone until {MIN_ENDED} of the key" in words
    assert f"from {MIN_PROMISED} to {MIN_ENDED - 1}, `1 + {MIN_ENDED}/n` times" in words
    assert MIN_PART == 2.0
    assert f"1 to {MAX_SESSION_CHARACTERS} characters" in words
    assert f"at most {MAX_LOOPS:,} of them" in words
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


CONFIG = RouterConfig(
    classes={
        "fast": ServiceClass(ttft_ms=100, tpot_ms=10, priority=5, service_tiers=("priority",)),
        "slow": ServiceClass(ttft_ms=5_000, tpot_ms=200, e2e_ms=60_000, service_tiers=("flex",)),
        "free": ServiceClass(),
    },
    default_class="slow",
)
READER = SloReader(CONFIG)

HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms", "x-slo-priority", "x-slo-class")
ALIASES = ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms")
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


def read(body: dict[str, Any] | None = None, *headers: tuple[str, str]) -> SLO:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return READER.read(body or {}, raw).slo


def refused(body: dict[str, Any] | None = None, *headers: tuple[str, str]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body, *headers)
    assert caught.value.reason.status == 400
    assert caught.value.reason is Reason.INVALID_VALUE
    json.dumps(caught.value.document())
    return caught.value


BODY = {"slo": {"ttft_ms": 1}}
HEADER = ("x-slo-ttft-ms", "2")
ALIAS = ("x-llm-d-slo-ttft-ms", "3")


@pytest.mark.parametrize(
    ("body", "headers", "ttft_s"),
    [
        (BODY, (HEADER, ALIAS), 0.001),
        (BODY, (ALIAS,), 0.001),
        ({}, (HEADER, ALIAS), 0.002),
        ({"slo": {"ttft_ms": None}}, (HEADER, ALIAS), 0.002),
        ({"slo": None}, (ALIAS,), 0.003),
        ({}, (ALIAS,), 0.003),
        ({}, (), 5.0),
    ],
)
def test_an_objective_comes_from_body_then_header_then_alias_then_class(
    body: dict[str, Any], headers: tuple[tuple[str, str], ...], ttft_s: float
) -> None:
    assert read(body, *headers).ttft_s == ttft_s


def test_precedence_is_field_by_field() -> None:
    slo = read(
        {"slo": {"ttft_ms": 50}},
        ("x-slo-ttft-ms", "60"),
        ("x-slo-tpot-ms", "7.5"),
        ("x-slo-priority", "3"),
    )
    assert slo == SLO(0.05, 0.0075, 60.0, 3, "slow")


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        ({"slo": {"class": "fast"}, "service_tier": "flex"}, "free", "fast"),
        ({"slo": {}, "service_tier": "flex"}, "free", "free"),
        ({"service_tier": "priority"}, None, "fast"),
        ({"service_tier": None}, None, "slow"),
        ({}, None, "slow"),
    ],
)
def test_the_class_comes_from_body_then_header_then_service_tier_then_default(
    body: dict[str, Any], header: str | None, expected: str
) -> None:
    slo = read(body, *([("x-slo-class", header)] if header else []))
    assert slo.service_class == expected
    assert slo.priority == CONFIG.classes[expected].priority


OURS, LLM_D, GATEWAY = ("x-slo-class", *OBJECTIVES)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"slo": {"class": "fast"}}, {LLM_D: "free", GATEWAY: "free"}, "fast"),
        ({}, {OURS: "fast", LLM_D: "free", GATEWAY: "free"}, "fast"),
        ({}, {LLM_D: "fast", GATEWAY: "free"}, "fast"),
        ({"service_tier": "flex"}, {GATEWAY: "fast"}, "fast"),
        ({}, {GATEWAY: "free"}, "free"),
    ],
)
def test_an_inference_objective_names_the_class(
    body: dict[str, Any], headers: dict[str, str], expected: str
) -> None:
    slo = read(body, *headers.items())
    assert slo == CONFIG.classes[expected].objective(expected)
    # As with our own header, one that is overridden is checked, and stated times come first.
    assert read(body, *headers.items(), ("x-llm-d-slo-tpot-ms", "70")).tpot_s == 0.07
    last = list(headers)[-1]
    error = refused(body, *{**headers, last: "gold"}.items())
    assert (error.param, error.message) == (
        last,
        f"{last} must be one of fast, slow, free, got 'gold'",
    )
    assert "once" in refused(body, *headers.items(), (last, "free")).message


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (("x-dynamo-meta-slo-ttft-ms", "250"), {"ttft_s": 0.25}),
        (("x-sgl-ttft-slo-ms", "250"), {"ttft_s": 0.25}),
        (("x-sgl-tps-slo", "40"), {"tpot_s": 0.025}),
        (("x-sgl-tps-slo", "0.001"), {"tpot_s": 1_000.0}),
        (("x-sgl-tps-slo", "1000000"), {"tpot_s": 1e-6}),
    ],
)
def test_times_of_other_routers_are_taken(
    header: tuple[str, str], expected: dict[str, float]
) -> None:
    slo = read({}, header)
    ttft_s, tpot_s = expected.get("ttft_s", 5.0), expected.get("tpot_s", 0.2)
    assert slo == SLO(ttft_s, tpot_s, 60.0, 1, "slow")
    # Ours first.
    assert read({}, header, ("x-slo-ttft-ms", "7"), ("x-slo-tpot-ms", "8")).times_s[:2] == (
        *(0.007, 0.008),
    )
    assert "once" in refused({}, header, header).message


@pytest.mark.parametrize(
    ("value", "expected"),
    [("system", "fast"), ("Interactive", "fast"), (" default ", "slow"), ("BULK", "slow")],
)
def test_a_class_of_the_sglang_gateway_is_that_of_the_service_tier(
    value: str, expected: str
) -> None:
    assert read({}, ("x-smg-priority", value)) == CONFIG.classes[expected].objective(expected)
    assert read({"slo": {"class": "free"}}, ("x-smg-priority", value)).service_class == "free"


def nvext(hints: Any = None, router: Any = None) -> dict[str, Any]:
    return {"nvext": {"agent_hints": hints, "router": router, "annotations": ["x"]}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (nvext(router={"ttft_target": 100}), SLO(0.1, 0.2, 60.0, 1, "slow")),
        (nvext(router={"itl_target": 20.5}), SLO(5.0, 0.0205, 60.0, 1, "slow")),
        (nvext({"priority": 7}), SLO(5.0, 0.2, 60.0, 7, "slow")),
        # A higher one is more important there, as here; it has no bounds there.
        (nvext({"priority": 200}), SLO(5.0, 0.2, 60.0, 10, "slow")),
        (nvext({"priority": -3}), SLO(5.0, 0.2, 60.0, 1, "slow")),
        (nvext({"speculative_prefill": True}), SLO(5.0, 0.2, 60.0, 1, "slow")),
        (
            {**nvext({"priority": 9}, {"ttft_target": 9}), "slo": {"ttft_ms": 8, "priority": 2}},
            SLO(0.008, 0.2, 60.0, 2, "slow"),
        ),
        ({"nvext": None}, SLO(5.0, 0.2, 60.0, 1, "slow")),
    ],
)
def test_dynamos_hints_are_taken(body: dict[str, Any], expected: SLO) -> None:
    assert read(body) == expected


def test_headers_go_before_dynamos_hints() -> None:
    assert read(nvext(router={"ttft_target": 9}), ("x-sgl-ttft-slo-ms", "8")).ttft_s == 0.008


def test_an_expected_length_is_no_objective() -> None:
    found = READER.read(nvext({"osl": 300}), ())
    assert (found.slo, found.expected_tokens) == (READER.read({}, ()).slo, 300)
    assert READER.read({}, ()).expected_tokens == 0


def test_values_of_other_routers_are_held_to_the_caps_of_the_key() -> None:
    caps = {"max_priority": 3, "min_ttft_ms": 100.0, "min_tpot_ms": 50.0, "classes": ("slow",)}
    body = nvext({"priority": 9}, {"ttft_target": 1})
    raw = [(b"x-sgl-tps-slo", b"100"), (b"x-smg-priority", b"interactive")]
    slo, clamped, *_ = READER.read(body, raw, TenantLimits(**caps))
    assert slo == SLO(0.1, 0.05, 60.0, 3, "slow")
    assert clamped == {"class": "slow", "priority": "3", "ttft_ms": "100", "tpot_ms": "50"}
    for part, said_in in (
        ((nvext({"priority": 9}), []), "nvext.agent_hints.priority"),
        ((nvext(router={"ttft_target": 1}), []), "nvext.router.ttft_target"),
        (({}, raw[:1]), "x-sgl-tps-slo"),
        (({}, raw[1:]), "x-smg-priority"),
    ):
        with pytest.raises(ApiError) as caught:
            READER.read(*part, TenantLimits(**caps, beyond="refuse"))
        assert (caught.value.reason, caught.value.param) == (Reason.NOT_PERMITTED, said_in)


def test_the_class_says_how_tpot_is_measured() -> None:
    classes = {"each": ServiceClass(tpot_ms=50, tpot_anchor="running_max"), "free": ServiceClass()}
    reader = SloReader(RouterConfig(classes=classes, default_class="free"))
    found = [
        reader.read({"slo": stated}, ()).slo
        for stated in ({"class": "each"}, {"class": "each", "tpot_ms": 70}, {"tpot_ms": 70})
    ]
    assert [slo.tpot_anchor.value for slo in found] == ["running_max", "running_max", "mean"]
    assert found[0] == classes["each"].objective("each")
    with pytest.raises(ValidationError, match="'mean', 'running_max' or 'window'"):
        ServiceClass(tpot_anchor="max")


BAD_MS = [0, -1, 0.0, nan, inf, True, "100", [], {}, 1e-9, MAX_OBJECTIVE_MS + 1, 10**400]
BAD_MS_TEXTS = [
    "nan",
    "inf",
    "-inf",
    "0",
    "-1",
    "1e3",
    "0x10",
    "1_000",
    "+5",
    "5.",
    "²",
    "abc",
    "1,5",
    "1e-9",
]
BAD_PRIORITIES = [0, 11, -3, 1.5, True, "2", nan, 10**30]
BAD_PRIORITY_TEXTS = ["", "0", "11", "1.0", "-1", "high", "99999999999999"]
CLASS = "one of fast, slow, free, got "
MILLISECONDS = "a number of milliseconds from 0.001 to"
PER_SECOND = "a number of tokens per second from 0.001 to 1000000, got "
PRIORITY = "an integer from 1 to 10, got "
SMG_CLASS = "one of system, interactive, default, bulk, got "
TIER = "one of auto, default, flex"
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"slo": {field: value}}, f"slo.{field}", MILLISECONDS)
        for field in ("ttft_ms", "tpot_ms", "e2e_ms")
        for value in BAD_MS
    ),
    *(({"slo": {"priority": value}}, "slo.priority", PRIORITY) for value in BAD_PRIORITIES),
    *(({"slo": {"class": value}}, "slo.class", CLASS) for value in ("gold", "", 3)),
    *(({"slo": value}, "slo", "an object") for value in (5, [])),
    *(({"service_tier": value}, "service_tier", TIER) for value in ("gold", 1, ["flex"])),
    ({"nvext": []}, "nvext", "an object, got "),
    (nvext([]), "nvext.agent_hints", "an object, got "),
    (nvext(router=3), "nvext.router", "an object, got "),
    (nvext(router={"ttft_target": "9"}), "nvext.router.ttft_target", MILLISECONDS),
    (nvext(router={"itl_target": 0}), "nvext.router.itl_target", MILLISECONDS),
    *(
        (nvext({"priority": each}), "nvext.agent_hints.priority", "an integer from -2147483648 to")
        for each in ("high", 1 << 31)
    ),
    *(
        (nvext({"osl": each}), "nvext.agent_hints.osl", "an integer from 1 to 2147483647, got ")
        for each in (0, True)
    ),
]
HEADER_MISTAKES = [
    *(
        (name, text, MILLISECONDS)
        for name in (*HEADERS[:3], *ALIASES, "x-dynamo-meta-slo-ttft-ms", "x-sgl-ttft-slo-ms")
        for text in ("", " 5", "5 ", "9" * 400, *BAD_MS_TEXTS)
    ),
    *(("x-slo-priority", text, PRIORITY) for text in BAD_PRIORITY_TEXTS),
    *(("x-sgl-tps-slo", text, PER_SECOND) for text in ("0", "NaN", "1000001")),
    *(("x-smg-priority", text, SMG_CLASS) for text in ("urgent", "")),
    ("x-slo-class", "gold", CLASS),
]


@pytest.mark.parametrize(("body", "param", "allowed"), MISTAKES)
def test_a_mistake_in_the_body_is_named(body: dict[str, Any], param: str, allowed: str) -> None:
    error = refused(body)
    assert error.param == param
    assert error.message.startswith(f"{param} must be {allowed}")


@pytest.mark.parametrize(("name", "text", "allowed"), HEADER_MISTAKES)
def test_a_mistake_in_a_header_is_named(name: str, text: str, allowed: str) -> None:
    error = refused({}, (name, text))
    assert error.param == name
    assert error.message.startswith(f"{name} must be {allowed}")


@pytest.mark.parametrize(
    ("body", "headers", "param", "text"),
    [
        ({"slo": {"tftt_ms": 1}}, (), "slo", "unknown key 'tftt_ms'"),
        ({}, (("x-slo-e2e", "5"),), "x-slo-e2e", "not a known header"),
        ({}, (HEADER, HEADER), "x-slo-ttft-ms", "once"),
        ({}, (ALIAS, ALIAS), "x-llm-d-slo-ttft-ms", "once"),
    ],
)
def test_what_is_unknown_or_given_twice_is_named(
    body: dict[str, Any], headers: tuple[tuple[str, str], ...], param: str, text: str
) -> None:
    error = refused(body, *headers)
    assert error.param == param
    assert text in error.message


def test_a_value_that_another_overrides_is_checked_too() -> None:
    refused(BODY, ("x-slo-ttft-ms", "never"))
    refused(BODY, ("x-llm-d-slo-tpot-ms", "0"))
    refused({"slo": {"class": "fast"}, "service_tier": "gold"})
    refused({"slo": {"class": "fast"}}, ("x-slo-class", "gold"))


def test_of_many_unknown_keys_the_first_is_named() -> None:
    class Keys(dict[str, Any]):
        seen = 0

        def __iter__(self) -> Iterator[str]:
            for key in super().__iter__():
                self.seen += 1
                yield key

    keys = Keys({"ttft_ms": 1, "tpot_ms": 1, "e2e_ms": 1, "priority": 1, "class": "fast"})
    keys |= {f"k{index}": 1 for index in range(10_000)}
    error = refused({"slo": keys})
    assert error.message.startswith("slo has the unknown key 'k0'; allowed: ttft_ms, ")
    assert keys.seen == 6


def test_a_hostile_value_is_not_repeated_in_full() -> None:
    assert len(refused({"slo": {"x" * 100_000: 1}}).message) < 300
    assert len(refused({"slo": {"class": "x" * 100_000}}).message) < 300
    assert refused({"slo": {"class": "\ud800é"}}).message.isascii()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
_FIELDS = st.sampled_from(["ttft_ms", "tpot_ms", "e2e_ms", "priority", "class", "x"])
_HINTS = st.dictionaries(
    st.sampled_from(["ttft_target", "itl_target", "priority", "osl", "x"]), _JSON, max_size=4
)


@given(
    slo=st.dictionaries(_FIELDS, _JSON, max_size=4) | _JSON,
    tier=_JSON,
    hints=st.dictionaries(st.sampled_from(["agent_hints", "router"]), _HINTS | _JSON) | _JSON,
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *(name for each in SLO_HEADER_SETS for name in each.values()),
                    *("x-slo-x", "accept"),
                ]
            ),
            st.text(st.characters(max_codepoint=255), max_size=12)
            | st.floats().map(str)
            | st.integers().map(str),
        ),
        max_size=4,
    ),
)
def test_anything_is_either_an_objective_or_a_400(
    slo: Any, tier: Any, hints: Any, headers: list[tuple[str, str]]
) -> None:
    try:
        result = read({"slo": slo, "service_tier": tier, "nvext": hints}, *headers)
    except ApiError as error:
        assert error.reason.status == 400
        assert error.param
        json.dumps(error.document()).encode()
    else:
        assert result.service_class in CONFIG.classes
        for seconds in (result.ttft_s, result.tpot_s, result.e2e_s):
            assert seconds is None or 1e-6 <= seconds <= MAX_OBJECTIVE_MS / 1000
        assert 1 <= result.priority <= 10 and type(result.priority) is int


_TIMES = st.sampled_from(["ttft_ms", "tpot_ms", "e2e_ms"])
_NEAR_BOUNDS = st.sampled_from([0, 0.0009, 0.001, 1, MAX_OBJECTIVE_MS, MAX_OBJECTIVE_MS + 0.1, 11])


def outcome(body: dict[str, Any], *headers: tuple[str, str]) -> SLO | str:
    """The objective, or what a refusal says of it."""
    try:
        return read(body, *headers)
    except ApiError as error:
        return error.message.partition(" must be ")[2].partition(", got")[0]


@given(
    field=_TIMES,
    value=st.floats(0.0001, 2 * MAX_OBJECTIVE_MS) | st.integers(0, 10**10) | _NEAR_BOUNDS,
)
@example(field="ttft_ms", value=333.3333333333333)
@example(field="ttft_ms", value=0.0010000000000000002)
def test_a_time_is_the_same_in_the_body_and_in_every_header(field: str, value: float) -> None:
    headers = [name for name in (*HEADERS, *ALIASES) if name.endswith(field.replace("_", "-"))]
    told = {outcome({}, (name, str(value))) for name in headers}
    assert told == {outcome({"slo": {field: value}})}


@pytest.mark.parametrize("name", [*CONFIG.classes, "gold", "", "FAST", "fast ", "\xe9"])
def test_a_class_is_the_same_in_the_body_and_in_its_header(name: str) -> None:
    for header in ("x-slo-class", *OBJECTIVES):
        assert outcome({}, (header, name)) == outcome({"slo": {"class": name}})


def ttl_s(*values: str) -> float:
    return queue_ttl_s([(b"x-llm-d-inference-ttl", value.encode("latin-1")) for value in values])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1500ms", 1.5),
        ("2s", 2),
        (" 2s ", 2),
        ("1m30s", 90),
        ("1h0.5m", 3_630),
        ("10us", 1e-5),
        ("24h", 86_400),
    ],
)
def test_a_queue_ttl_is_a_duration_as_in_go(text: str, seconds: float) -> None:
    assert ttl_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "5", "0s", "-1s", "1", "s", "1 s", "1d", "soon", "24h1ns", "9" * 12 + "h", "1s" * 7],
)
def test_a_bad_queue_ttl_is_named(text: str) -> None:
    with pytest.raises(
        ApiError, match=r"must be a duration such as 1500ms .* at most 24h"
    ) as caught:
        ttl_s(text)
    assert caught.value.reason is Reason.INVALID_VALUE
    assert caught.value.param == "x-llm-d-inference-ttl"


def test_a_queue_ttl_is_given_once_or_not_at_all() -> None:
    assert ttl_s() == inf
    with pytest.raises(ApiError, match="once"):
        ttl_s("1s", "1s")


@given(st.text(st.characters(max_codepoint=255), max_size=12))
def test_anything_is_a_queue_ttl_or_a_400(text: str) -> None:
    try:
        assert 0 < ttl_s(text) <= 86_400
    except ApiError as error:
        assert error.reason.status == 400 and error.message.isascii()


@given(
    ms=st.floats(min_value=0.001, max_value=MAX_OBJECTIVE_MS),
    priority=st.integers(min_value=1, max_value=10),
)
def test_what_is_allowed_is_taken_exactly(ms: float, priority: int) -> None:
    slo = read({"slo": {"ttft_ms": ms, "tpot_ms": ms, "e2e_ms": ms, "priority": priority}})
    assert slo == SLO(ms / 1000, ms / 1000, ms / 1000, priority, "slow")


@pytest.mark.parametrize(
    "classes",
    [
        {"bad name": ServiceClass()},
        {"é": ServiceClass()},
        {"a": ServiceClass(service_tiers=("t",)), "b": ServiceClass(service_tiers=("t",))},
    ],
)
def test_classes_that_cannot_be_sent_or_told_apart_are_refused(
    classes: dict[str, ServiceClass],
) -> None:
    with pytest.raises(ValidationError):
        RouterConfig(classes=classes, default_class=next(iter(classes)))


@pytest.mark.parametrize(
    ("endpoint", "tier", "service_class"),
    [
        ("messages", "auto", "slow"),
        ("messages", "standard_only", "standard"),
        ("messages", "default", None),
        ("messages", "priority", None),
        ("chat", "scale", "slow"),
        ("chat", "flex", "cheap"),
        ("embeddings", "default", "standard"),
        ("chat", "standard_only", None),
        ("chat", "gold", "rich"),
    ],
)
def test_the_tiers_are_those_of_the_api(
    endpoint: Endpoint, tier: str, service_class: str | None
) -> None:
    classes = {
        "slow": ServiceClass(),
        "standard": ServiceClass(service_tiers=("default",)),
        "cheap": ServiceClass(service_tiers=("flex",)),
        "rich": ServiceClass(service_tiers=("gold",)),
    }
    reader = SloReader(RouterConfig(classes=classes, default_class="slow"))
    body = {"service_tier": tier}
    if service_class is not None:
        assert reader.read(body, (), endpoint=endpoint).slo.service_class == service_class
        return
    with pytest.raises(ApiError, match="service_tier must be one of auto, "):
        reader.read(body, (), endpoint=endpoint)
