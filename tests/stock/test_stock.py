from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.documents import ROOT, section
from tests.stock.compare import LISTED, Answer, differences
from tests.stock.rows import Row, rows
from tests.stock.servers import servers


def test_the_document_has_each_listed_difference() -> None:
    text = section(ROOT / "docs" / "clients.md", "What differs from vLLM's own server")
    assert re.findall(r"^\| ([a-z ]+) \| .+ \| .+ \|$", text, re.MULTILINE) == [
        "what",
        *(each.name for each in LISTED),
    ]


def test_a_difference_is_found() -> None:
    def answer(status: int = 200, **body: object) -> Answer:
        return Answer(status, "application/json", body)

    same = answer(id="a", text="x", logprob=-1.0, usage={"n": 1})
    for other, found in (
        (answer(id="b", text="x", logprob=-1.0001, usage={"n": 1}), []),
        (answer(id="b", text="y", logprob=-1.0, usage={"n": 1}), ["text: x, stock y"]),
        (answer(id=None, text="x", logprob=-1.1, usage={}), ["id: a, stock null", "logprob: -1.0"]),
        (answer(400), ["status: 200, stock 400"]),
    ):
        told = list(differences(same, other))
        assert len(told) >= len(found) and (found or not told)
        assert all(one.startswith(start) for one, start in zip(told, found, strict=False))


@pytest.mark.release
@pytest.mark.ray
@pytest.mark.vllm
def test_every_difference_is_listed(tmp_path: Path) -> None:
    unlisted, seen = [], set()
    with servers(tmp_path) as (sluice, stock), httpx.Client(timeout=120) as client:
        for row in rows():
            for found in differences(
                _ask(client, sluice, row), _ask(client, stock[row.model], row)
            ):
                reasons = {
                    each.name
                    for each in LISTED
                    if re.search(each.rows, str(row)) and re.search(each.found, found)
                }
                seen |= reasons
                if not reasons:
                    unlisted.append(f"{row}: {found}")
    assert not unlisted, "\n".join(unlisted)
    assert seen == {each.name for each in LISTED}, "a listed difference is gone"


def _ask(client: httpx.Client, base: str, row: Row) -> Answer:
    given = {"content": row.body.encode()} if isinstance(row.body, str) else {"json": row.body}
    headers = {"content-type": "application/json"}
    try:
        response = client.request(row.method, base + row.path, headers=headers, **given)  # type: ignore[arg-type]
    except httpx.RemoteProtocolError as error:
        return Answer(0, "", str(error))
    return Answer.of(response)
