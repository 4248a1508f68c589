"""Traces: each format is read for what it says, and what is wrong with a file is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from sluice.scheduling.request.objective import SLO
from sluice.simulation import traces
from sluice.simulation.traces import TraceError, load

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,110,27
2023-11-16 18:18:03.9799600,7433,14
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,300,0,300,API log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
7.5,abc,1.25,ChatGPT,472,18,490,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3001, "input_length": 900, "output_length": 7, "hash_ids": [0, 3]}
"""
QWEN = """{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, \
"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 13148]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.25, "input_length": 50, \
"output_length": 9, "type": "search", "turn": 2, "hash_ids": [1089, 1090, 2, 3]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.data"
    path.write_text(text, encoding="utf-8")
    return path


class Read(NamedTuple):
    """What a trace says: times, lengths, tasks and hashes of its requests, and its blocks."""

    text: str
    requests: list[tuple[float, int, int, str, tuple[int, ...]]]
    block_tokens: int = 512
    description: str = "Azure LLM inference trace, trace.data, "


FORMATS = {
    "azure 2023": Read(
        AZURE_2023,
        [(0, 4808, 10, "", ()), (0.5, 110, 27, "", ()), (60, 7433, 14, "", ())],
        description="Azure LLM inference trace, trace.data, 3 requests.",
    ),
    "azure 2024": Read(AZURE_2024, [(0, 2162, 5, "", ()), (0.99007, 2399, 6, "", ())]),
    "burstgpt": Read(
        BURSTGPT,
        [(0, 472, 18, "Conversation log", ()), (113, 417, 276, "API log", ())],
        description="left out 1 without prompt or output",
    ),
    "burstgpt 3": Read(BURSTGPT_3, [(0, 472, 18, "Conversation log", ())], description="BurstGPT"),
    "mooncake": Read(
        MOONCAKE,
        [(0, 1030, 5, "", (0, 1, 2)), (3.001, 900, 7, "", (0, 3))],
        description="Mooncake trace",
    ),
    "qwen": Read(
        QWEN,
        [(0, 33, 132, "text", (1089, 1090, 13148)), (0.75, 50, 9, "search", (1089, 1090, 2, 3))],
        block_tokens=16,
        description="Qwen-Bailian trace",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_for_what_it_says(tmp_path: Path, name: str) -> None:
    expected, workload = FORMATS[name], load(written(tmp_path, FORMATS[name].text))
    found = [
        (a.arrival_s, a.prompt_tokens, a.output_tokens, a.task, a.block_hashes)
        for a in workload.arrivals
    ]
    assert [each[1:] for each in found] == [each[1:] for each in expected.requests]
    times_s = [each[0] for each in expected.requests]
    assert [each[0] for each in found] == pytest.approx(times_s, abs=1e-6)
    assert workload.block_tokens == expected.block_tokens
    assert expected.description in workload.description
    assert (workload.name, workload.scaling) == ("trace", "as recorded")
    assert {arrival.slo for arrival in workload.arrivals} == {SLO()}


def test_the_objective_is_the_callers(tmp_path: Path) -> None:
    slo = SLO(ttft_s=2.0)
    assert load(written(tmp_path, MOONCAKE), slo).arrivals[1].slo is slo


def test_a_limit_takes_the_head_and_says_so(tmp_path: Path) -> None:
    workload = load(written(tmp_path, AZURE_2023 + "unread beyond the limit"), limit=2)
    assert len(workload) == 2
    assert "2 requests; cut after 2" in workload.description
    assert "cut" not in load(written(tmp_path, AZURE_2023), limit=3).description
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load(written(tmp_path, AZURE_2023), limit=0)


def test_a_byte_order_mark_windows_lines_and_blank_lines_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (AZURE_2023 + "\n").replace("\n", "\r\n").encode())
    assert len(load(path)) == 3


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"trace.data: is empty"),
        ("\n \n", r"is empty"),
        (AZURE_HEADER, r"has no requests"),
        ("a,b\n1,2\n", r"has the columns 'a', 'b'. A trace has one of: Azure"),
        ("TIMESTAMP,ContextTokens\n", r"For Azure LLM inference trace it lacks GeneratedTokens"),
        (AZURE_HEADER + "soon,1,2\n", r":2: TIMESTAMP is 'soon'; allowed is an ISO date"),
        (AZURE_HEADER + "2023-11-16,1.5,2\n", r":2: ContextTokens is '1.5'; allowed is a whole"),
        (AZURE_HEADER + "2023-11-16,-1,2\n", r"ContextTokens is '-1'"),
        (AZURE_HEADER + "2023-11-16,1," + "9" * 30 + "\n", r"GeneratedTokens is '9+'; allowed"),
        (AZURE_HEADER + "2023-11-16,1\n", r":2: has 2 columns, the header has 3"),
        (AZURE_HEADER + '2023-11-16,"1,2\n', r":2: is not CSV"),
        (AZURE_HEADER + "2023-11-16,0,2\n", r"all of its 1 requests have no prompt or no output"),
        (
            AZURE_HEADER + "2023-11-16 00:00:02,1,2\n2023-11-16 00:00:01,1,2\n",
            r":3: TIMESTAMP is '2023-11-16 00:00:01'; .* not before that of the request above",
        ),
        (BURSTGPT.replace("45", "nan"), r":3: Timestamp is 'nan'; allowed is a number"),
        (BURSTGPT.replace("45", "4"), r":3: Timestamp is '4'; .*sort the file"),
        ("{}\n", r"has the columns \. A trace has one of"),
        ("{not json\n", r":1: is not JSON"),
        ('{"timestamp": 1' + "[" * 100_000 + "\n", r":1: is not JSON"),
        (MOONCAKE + "[1, 2]\n", r":3: must be a JSON object, got \[1, 2\]"),
        (MOONCAKE + '{"timestamp": 3001}\n', r":3: input_length is nothing"),
        (MOONCAKE + '{"input_length": 1}\n', r":3: timestamp is nothing; allowed is a number"),
        (MOONCAKE.replace("3001", "true"), r":2: timestamp is True"),
        (MOONCAKE.replace("900", '"x"'), r":2: input_length is 'x'"),
        (MOONCAKE.replace("900", "1e3"), r":2: input_length is 1000.0"),
        (MOONCAKE.replace("900", "99999999"), r"a whole number from 0 to 10000000"),
        (MOONCAKE.replace("[0, 3]", '[0, "3"]'), r":2: hash_ids is \[0, '3'\]; allowed is a list"),
        (MOONCAKE.replace("[0, 3]", "5"), r":2: hash_ids is 5"),
        (MOONCAKE.replace("[0, 3]", "[0, 3, 4]"), r":2: hash_ids is .* prompt, 2 and not 3"),
        (QWEN.replace("[1089, 1090, 2, 3]", "[7, 8]"), r":2: hash_ids is .* prompt, 4 and not 2"),
        (QWEN.replace('"search"', "null"), r":2: type is None; allowed is a text"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint) as caught:
        load(written(tmp_path, text))
    assert "trace.data" in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_a_line_without_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_MAX_LINE", 100)
    with pytest.raises(TraceError, match=r":5: line longer than 100 characters"):
        load(written(tmp_path, AZURE_2023 + "9" * 101))


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        load(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load(tmp_path)
    path = tmp_path / "packed.csv"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xff")
    with pytest.raises(TraceError, match="not UTF-8"):
        load(path)


TRACES = os.environ.get("SLUICE_TRACES")


@pytest.mark.skipif(not TRACES, reason="SLUICE_TRACES names no folder of published traces")
def test_published_traces_are_read_whole() -> None:
    assert TRACES
    paths = [path for path in Path(TRACES).iterdir() if path.suffix in (".csv", ".jsonl")]
    assert paths, f"{TRACES} has no traces"
    for path in paths:
        workload = load(path)
        lines = sum(1 for line in path.open(encoding="utf-8") if line.strip())
        requests = lines - (path.suffix == ".csv")
        assert 0.9 * min(requests, traces.MAX_REQUESTS) <= len(workload) <= requests
        assert 0 < workload.rate < 1000
        assert workload.arrivals[0].arrival_s == 0
        if "hash_ids" in path.open(encoding="utf-8").readline():
            blocks = [
                (-(-arrival.prompt_tokens // workload.block_tokens), len(arrival.block_hashes))
                for arrival in workload.arrivals
            ]
            assert all(expected == found for expected, found in blocks)
