"""Large bodies are parsed in pieces, to the same values as in one."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.router.errors import ApiError
from sluice.router.request import body
from sluice.router.request.body import parse_in_pieces, parse_object

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
        patch.setattr(body, "PIECE_BYTES", piece)
        patch.setattr(body, "MANY_VALUES", many)
        parsed = parse_in_pieces(raw)
    assert parsed == fields
    assert repr(parsed) == repr(json.loads(raw)), "also the types"


def test_no_call_of_the_parser_gets_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def decode(text: bytes) -> Any:
        lengths.append(len(text))
        return msgspec.json.decode(text)

    monkeypatch.setattr(body, "_decode", decode)
    monkeypatch.setattr(body, "_decode_list", decode)
    raw = b'{"model":"m","prompt":[' + b"1," * 500_000 + b"1]}"
    assert parse_in_pieces(raw)["prompt"] == [1] * 500_001
    assert max(lengths) <= body.PIECE_BYTES + 16
    assert len(lengths) > 7


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
