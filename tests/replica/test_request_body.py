"""Bodies on their way from a router to a replica."""

from __future__ import annotations

import json
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.protocol.requests import RequestBody

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Half surrogate pairs are no text.
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)
FIELDS = st.dictionaries(st.sampled_from("abcdef"), JSON)


def sent(body: RequestBody) -> RequestBody:
    arrived = pickle.loads(pickle.dumps(body))
    assert isinstance(arrived, RequestBody)
    return arrived


@given(FIELDS, st.booleans())
def test_a_body_is_parsed_as_the_standard_library_does(
    fields: dict[str, Any], ascii_only: bool
) -> None:
    text = json.dumps(fields, ensure_ascii=ascii_only)
    assert RequestBody.parse(text.encode()) == json.loads(text) == RequestBody.of(fields)


@given(FIELDS, st.lists(FIELDS, max_size=3), st.data())
def test_changes_arrive_with_the_body(
    first: dict[str, Any], others: list[dict[str, Any]], data: st.DataObject
) -> None:
    body = RequestBody.parse(json.dumps(first).encode())
    for other in others:
        names = st.sets(st.sampled_from(sorted(body)) if body else st.nothing())
        removed = data.draw(names)
        fields = {name: value for name, value in body.items() if name not in removed} | other
        body = body.with_fields(fields)
        assert body == fields
        assert sent(body) == fields
    assert sent(sent(body)) == body


def test_what_was_not_changed_travels_as_the_bytes_that_came() -> None:
    ids = list(range(100_000))
    raw = json.dumps({"prompt": ids, "slo": {}, "max_tokens": 9}).encode()
    body = RequestBody.parse(raw)
    changed = body.with_fields({"prompt": body["prompt"], "max_tokens": 5})
    assert raw in pickle.dumps(changed)
    assert len(pickle.dumps(changed)) < len(raw) + 500
    assert sent(changed) == {"prompt": ids, "max_tokens": 5}


@pytest.mark.parametrize("raw", [b"[]", b"1", b'{"a": NaN}', b'{"a": 1e999}', b"{} {}"])
def test_anything_but_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        RequestBody.parse(raw)
