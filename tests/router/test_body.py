"""What the router lets through to an engine."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import grpc  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.deploy import ray_start
from sluice.protocol.requests import Endpoint, RequestBody
from sluice.router.errors import ApiError, Reason
from sluice.router.request import body as reading
from sluice.router.request.body import MAX_DEPTH, MAX_PARTS, parse_in_pieces, parse_object
from sluice.router.request.prompt import (
    MAX_CONVERSATIONS,
    MAX_RATIO,
    MESSAGE_TOKENS,
    MIN_RATIO,
    PromptSize,
    TokenEstimator,
    measure,
)
from sluice.router.request.validation import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    check_body,
    engine_body,
)
from sluice.router.serve.replicas import failure_of
from tests.router.far_side import (
    CHAT_BODY,
    COMPLETION_BODY,
    Edge,
    FarController,
    FarSide,
    fail,
    serve,
)

# Messages above gRPC's limit: the request is at fault, and its replica is not.

_LIMIT = 64 << 10


async def refusal(size: int) -> grpc.aio.AioRpcError:
    """How gRPC itself refuses an answer of ``size`` bytes where :data:`_LIMIT` are allowed."""

    async def answer(_: bytes, __: object) -> bytes:
        return b"x" * size

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limit = [("grpc.max_receive_message_length", _LIMIT)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", limit) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/m")(b"")
    finally:
        await server.stop(None)
    error: grpc.aio.AioRpcError = caught.value
    return error


async def test_a_message_that_is_too_large_is_the_requests_fault() -> None:
    failure = failure_of(await refusal(_LIMIT + 1))
    assert failure.reason is Reason.TOO_LARGE
    side = FarSide(a=fail(failure), b=serve)
    controller = FarController("a")
    edge = Edge(side, controller)
    async with edge.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY)
    assert answer.status_code == 413
    assert "maximum message size" in answer.json()["error"]["message"]
    assert [name for name, _ in side.calls] == ["a"], "computed once"
    assert controller.troubles == []
    assert controller.gone == []
    assert edge.sample("sluice_retries_total") == 0


def test_a_cluster_takes_larger_messages_than_any_body() -> None:
    limit = int(ray_start.TUNED["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert limit > 1 << 30, "router.max_body_bytes may be 1 GiB"
    assert limit < 1 << 31, "gRPC takes a signed 32-bit number"


# Large bodies are parsed in pieces, to the same values as in one.

_NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
_VALUES = st.recursive(
    st.one_of(_NUMBERS, st.none(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)
_FIELDS = st.dictionaries(
    st.text(max_size=3), st.one_of(_VALUES, st.lists(_NUMBERS, max_size=40)), max_size=4
)


@given(_FIELDS, st.sampled_from((None, 1)), st.sampled_from((1, 3, 16)), st.sampled_from((0, 99)))
def test_pieces_make_what_the_whole_makes(
    fields: dict[str, Any], indent: int, piece: int, many: int
) -> None:
    raw = json.dumps(fields, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece)
        patch.setattr(reading, "MANY_VALUES", many)
        parsed = parse_in_pieces(raw)
    assert parsed == fields
    assert repr(parsed) == repr(json.loads(raw)), "also the types"


@pytest.mark.parametrize("value", [b'"a"', b"null", b'"a",1', b"1e0,-2.5,true"])
def test_short_values_of_any_kind_let_others_have_their_turn(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[float] = []
    monkeypatch.setattr(time, "sleep", turns.append)
    raw = b'{"model":"m","stop":[{"x":[' + (value + b",") * 200_000 + b'"end"]}]}'
    assert parse_in_pieces(raw) == json.loads(raw)
    constants = {b"null"}
    assert value in constants or len(turns) >= 200


def test_a_long_list_of_numbers_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    monkeypatch.setattr(time, "sleep", turns.append)
    raw = b'{"model":"m","prompt":[' + b"1," * 500_000 + b"1]}"
    assert parse_in_pieces(raw)["prompt"] == [1] * 500_001
    assert len(turns) >= len(raw) // reading.PIECE_BYTES


@pytest.mark.parametrize("value", [rb'"\ud800"', rb'{"\udfff":1}', b"1e999", b"NaN", b"-Infinity"])
def test_what_no_value_may_be_is_refused_one_by_one(value: bytes) -> None:
    raw = b'{"prompt":[' + b'"a",' * 150_000 + value + b"]}"
    with pytest.raises((ApiError, msgspec.DecodeError)):
        parse_object(raw)


@pytest.mark.parametrize(
    "tail", [b"1]", b",1]}", b"]}", b"1]}x", b"nul]}", b"NaN]}", b"1e999]}", b'"\xff"]}', b"01]}"]
)
def test_what_is_no_json_is_refused_at_any_size(tail: bytes) -> None:
    raw = b'{"prompt":[' + b"1," * 100_000 + tail
    with pytest.raises(ApiError, match="not a JSON object"):
        parse_object(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"9" * 5_000 + b"}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a":' * 65 + b"1" + b"}" * 65,
    ],
)
def test_what_is_not_a_sound_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(raw)
    assert caught.value.reason.status == 400
    assert len(caught.value.message) < 300


def test_the_deepest_body_that_is_allowed() -> None:
    raw = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(raw)["a"]
    flat = parse_object(json.dumps({"a": [[]] * 1000}).encode())
    assert len(flat["a"]) == 1000


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except ApiError as error:
        assert error.reason.status == 400


@pytest.mark.parametrize(
    "value",
    [
        {"a": [[]] * MAX_PARTS},
        {"a": [{}] * MAX_PARTS},
        {str(index): 1 for index in range(MAX_PARTS)},
        {"slo": {str(index): 1 for index in range(MAX_PARTS)}},
    ],
    ids=["lists", "objects", "keys", "keys of slo"],
)
def test_a_body_of_too_many_parts_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"too many lists, objects and keys; allowed: {MAX_PARTS}"):
        parse_object(json.dumps(value).encode())


@pytest.mark.parametrize("text", ["[{:" * MAX_PARTS, '"[' * MAX_PARTS, "\\[" * MAX_PARTS, "\\"])
def test_what_stands_in_a_text_or_is_a_number_is_no_part(text: str) -> None:
    body = {"prompt": [text, "[\\", "]"], "ids": [1] * MAX_PARTS}
    assert parse_object(json.dumps(body).encode()) == body


def parts_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(parts_of(entry) for entry in value.values())
    return 1 + sum(parts_of(entry) for entry in value) if isinstance(value, list) else 0


_TEXT = st.text(st.sampled_from('"\\[]{}:,a'), max_size=6)


@given(
    st.dictionaries(
        _TEXT,
        st.recursive(
            _TEXT | st.integers(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
        ),
    )
)
def test_parts_are_counted_exactly(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sluice.router.request.body.MAX_PARTS", parts_of(body))
        assert parse_object(raw) == body
        patch.setattr("sluice.router.request.body.MAX_PARTS", parts_of(body) - 1)
        with pytest.raises(ApiError, match="too many"):
            parse_object(raw)


BAD: dict[str, list[Any]] = {
    "model": ["", None, 3],
    "stream": [1, "true"],
    "n": [0, 17, 1.5, True],
    "max_tokens": [0, -5, "5", 2**31],
    "max_completion_tokens": [0],
    "kv_transfer_params": [{"do_remote_prefill": True}],
    "ec_transfer_params": [{}],
    "guided_json": [{"type": "integer"}],
    "guided_decoding_backend": ["xgrammar"],
    "request_id": ["mine"],
    "priority": [-100],
    "vllm_xargs": [{"sluice": "x"}, {"Sluice_slo": "x"}, {"kv_transfer_params": "x"}, 5],
}


@pytest.mark.parametrize(("field", "value"), [(name, bad) for name in BAD for bad in BAD[name]])
def test_bad_fields_are_named(field: str, value: Any) -> None:
    for endpoint, body in (("chat", CHAT_BODY), ("completions", COMPLETION_BODY)):
        with pytest.raises(ApiError) as caught:
            check_body(endpoint, {**body, field: value})  # type: ignore[arg-type]
        assert caught.value.param == field
        assert caught.value.reason.status == 400
    with pytest.raises(ApiError, match="model must be a string of 1 to 512 characters, got noth"):
        check_body("chat", {"messages": CHAT_BODY["messages"]})


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_no_endpoint_lets_a_client_say_where_kv_is(endpoint: Endpoint, name: str) -> None:
    """It would have an engine connect anywhere, or take the prompt of another client."""
    for body in ({name: {"remote_host": "x"}}, {"vllm_xargs": {name: "x"}}):
        with pytest.raises(ApiError, match="for the server's own use"):
            check_body(endpoint, {"model": "m", "stream": True, **body})


@pytest.mark.parametrize("messages", [None, [], "hi", {}, ["hi"], [{}], [{"role": 1}], [None]])
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ApiError, match="messages"):
        check_body("chat", {"model": "m", "messages": messages})


def test_the_number_of_messages_and_of_their_parts_is_limited() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    check_body("chat", {"model": "m", "messages": [message] * MAX_MESSAGES})
    with pytest.raises(ApiError, match="at most 4096 messages, got 4097"):
        check_body("chat", {"model": "m", "messages": [message] * (MAX_MESSAGES + 1)})
    half = {"role": "user", "content": ["hi"] * (MAX_CONTENT_PARTS // 2)}
    check_body("chat", {"model": "m", "messages": [half, half]})
    with pytest.raises(ApiError, match="at most 16384 content parts together, got 16385"):
        check_body("chat", {"model": "m", "messages": [half, half, message]})


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, {}, [], [[]], [None], [1.5], [True], [-1], [2**31], ["x"] * 129),
        *([1, "a"], ["a", 1], ["a", [1]], [[1], "a"], [[1], []]),
    ],
)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt"):
        check_body("completions", {"model": "m", "prompt": prompt})


@pytest.mark.parametrize("prompt", ["", "hi", ["a", "b"], [1, 2, 0], [[1], [2, 3]], ["x"] * 128])
def test_good_prompts_pass(prompt: Any) -> None:
    check_body("completions", {"model": "m", "prompt": prompt})


def test_everything_else_is_left_to_the_engine() -> None:
    body = {
        **CHAT_BODY,
        "temperature": 99,
        "tools": "nonsense",
        "made_up": [1],
        "vllm_xargs": {"mine": 1},
        "n": None,
        "stream": None,
        "max_tokens": None,
        "priority": None,
    }
    check_body("chat", body)
    parsed = RequestBody.of({**body, "slo": {}, "service_tier": "auto"})
    assert engine_body(parsed, parsed) == {
        name: value for name, value in body.items() if name != "priority"
    }


@pytest.mark.parametrize(
    ("endpoint", "body", "size"),
    [
        ("completions", {"prompt": "abcd"}, PromptSize(characters=4)),
        ("completions", {"prompt": ["abcd", "ef"]}, PromptSize(characters=6)),
        ("completions", {"prompt": [7, 8, 9]}, PromptSize(tokens=3)),
        ("completions", {"prompt": [[7], [8, 9]]}, PromptSize(tokens=3)),
        ("chat", {"messages": [{"role": "user", "content": "abcd"}]}, PromptSize(4, 4)),
        ("chat", {"messages": [{"role": "user"}, {"role": "x", "content": ""}]}, PromptSize(0, 8)),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]},
            PromptSize(3, MESSAGE_TOKENS),
        ),
    ],
)
def test_measuring_a_prompt(endpoint: Any, body: dict[str, Any], size: PromptSize) -> None:
    assert measure(endpoint, body) == size


def test_token_ids_are_estimated_exactly() -> None:
    estimator = TokenEstimator()
    estimator.learn(PromptSize(characters=100), 100)
    assert estimator.estimate(PromptSize(tokens=123)) == 123


def test_a_conversation_is_estimated_by_its_own_last_prompt() -> None:
    """Of 40,000 tokens 4 % are as many as a turn adds."""
    estimator = TokenEstimator()
    code, prose = PromptSize(100_000, 40, conversation=1), PromptSize(200_000, 40, conversation=2)
    for _ in range(20):
        estimator.learn(code, 40_040)
        estimator.learn(prose, 40_040)
    more = PromptSize(104_000, 48, conversation=1)
    assert estimator.estimate(more) == 48 + 41_600
    assert estimator.estimate(prose) == 40_040
    unknown = estimator.estimate(PromptSize(104_000, 48))
    assert unknown == estimator.estimate(PromptSize(104_000, 48, conversation=3)) != 48 + 41_600
    for conversation in range(3, MAX_CONVERSATIONS + 2):
        estimator.learn(PromptSize(100, conversation=conversation), 100)
    assert estimator.estimate(prose) == 40_040
    assert estimator.estimate(more) != 48 + 41_600, "the one of longest ago is forgotten"


@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(0, 10**6), st.integers(-5, 10**7)),
        max_size=30,
    )
)
def test_the_ratio_stays_bounded(observations: list[tuple[int, int, int]]) -> None:
    estimator = TokenEstimator()
    for characters, tokens, prompt_tokens in observations:
        estimator.learn(PromptSize(characters, tokens), prompt_tokens)
        assert MIN_RATIO <= estimator.ratio <= MAX_RATIO
    assert estimator.estimate(PromptSize()) == 1


@pytest.mark.parametrize(
    ("endpoint", "change"),
    [
        ("chat", {"max_tokens": 16.0, "n": 2.0}),
        ("chat", {"max_completion_tokens": 16.0}),
        ("completions", {"max_tokens": 0.0, "echo": True}),
        ("completions", {"prompt": [5.0, 6]}),
        ("completions", {"prompt": [[5, 6], [7.0]]}),
        ("responses", {"max_output_tokens": 16.0, "input": "x"}),
        ("messages", {"max_tokens": 16.0}),
        ("embeddings", {"input": [5.0]}),
        ("detokenize", {"tokens": [5.0, 6.0]}),
    ],
)
def test_an_integer_may_be_written_with_a_point(endpoint: Endpoint, change: dict[str, Any]) -> None:
    prompt = {} if endpoint == "responses" else {"prompt": "x"}
    body = {"model": "m", "messages": [{"role": "user"}], **prompt, **change}
    read = check_body(endpoint, body)
    for name, value in change.items():
        assert (read[name], repr(read[name])) == (value, repr(value).replace(".0", ""))
        broken = {**body, name: 16.5 if isinstance(value, float) else [5.5]}
        if name not in ("echo", "input") or endpoint == "embeddings":
            with pytest.raises(ApiError) as refused:
                check_body(endpoint, broken)
            assert refused.value.param == name


def test_nothing_is_generated_only_with_echo() -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 0}
    assert check_body("completions", {**body, "echo": True})["max_tokens"] == 0
    for wrong in (body, {**body, "echo": False}, {**body, "echo": True, "max_tokens": -1}):
        with pytest.raises(ApiError) as refused:
            check_body("completions", wrong)
        assert refused.value.param == "max_tokens"


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(ApiError, match="not a JSON object"):
        parse_object('{"a": 1}'.encode("utf-16"))
