"""Hashes of prompts' beginnings: alike as far as the prompts are, and no further."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.router.request.prompt import MESSAGE_TOKENS, measure, prefix_of
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, NO_PREFIX, TOKEN_UNITS
from sluice.scheduling.request.job import MAX_CHUNKS

LETTERS = "abcdefgh\0é中"


def chat(*contents, **fields):
    roles = ("system", "user", "assistant")
    messages = [
        {"role": roles[place % 3], "content": content} for place, content in enumerate(contents)
    ]
    return {"model": "m", "messages": messages, **fields}


def common(first, second):
    """How many leading hashes two bodies of a chat share."""
    one, other = prefix_of("chat", first).hashes, prefix_of("chat", second).hashes
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    # Chains that have parted do not meet again.
    assert not set(one[shared:]) & set(other[shared:])
    return shared


texts = st.builds(
    lambda seed, repeat: seed * repeat, st.text(LETTERS, min_size=1), st.integers(1, 400)
)


@given(texts, texts, texts)
def test_prompts_share_the_hashes_of_their_common_beginning(shared, one, other):
    bodies = [{"model": "m", "prompt": shared + end} for end in (one, other)]
    prefixes = [prefix_of("completions", body) for body in bodies]
    alike = 0
    prompts = [body["prompt"] for body in bodies]
    while alike < min(map(len, prompts)) and prompts[0][alike] == prompts[1][alike]:
        alike += 1
    whole = sum(end <= alike for end in CHUNK_ENDS)
    one_hashes, other_hashes = (prefix.hashes for prefix in prefixes)
    assert one_hashes[:whole] == other_hashes[:whole]
    assert len(one_hashes[:whole]) == whole
    assert not set(one_hashes[whole:]) & set(other_hashes[whole:])
    assert [prefix.size for prefix in prefixes] == [len(prompt) for prompt in prompts]


@given(st.lists(texts, min_size=1, max_size=5), texts)
def test_a_longer_conversation_keeps_the_hashes_of_a_shorter_one(contents, more):
    shorter, longer = prefix_of("chat", chat(*contents)), prefix_of("chat", chat(*contents, more))
    assert longer.hashes[: len(shorter.hashes)] == shorter.hashes
    assert all(0 < chunk < 1 << 63 for chunk in longer.hashes)
    assert len(set(longer.hashes)) == len(longer.hashes)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=900), st.integers(0, 900))
def test_token_ids_are_hashed_by_128(ids, kept):
    ids = ids or [0]
    prefix = prefix_of("completions", {"model": "m", "prompt": ids})
    assert len(prefix.hashes) == len(ids) // 128
    assert prefix.size == TOKEN_UNITS * len(ids)
    cut = ids[: max(1, kept)]
    other = prefix_of("completions", {"model": "m", "prompt": [cut]})
    assert other.hashes == prefix.hashes[: len(cut) // 128]


BASE = chat("s" * 700, "u" * 2000, "a" * 900)


@pytest.mark.parametrize(
    "field, value",
    [
        ("model", "another"),
        ("cache_salt", "mine"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"thinking": True}),
        ("reasoning_effort", "high"),
    ],
)
def test_what_changes_all_of_a_prompt_changes_all_hashes(field, value):
    assert common(BASE, {**BASE, field: value}) == 0


@pytest.mark.parametrize("field, value", [("temperature", 0.5), ("max_tokens", 7), ("user", "u")])
def test_what_changes_nothing_of_a_prompt_changes_no_hash(field, value):
    assert prefix_of("chat", {**BASE, field: value}) == prefix_of("chat", BASE) != NO_PREFIX


@pytest.mark.parametrize(
    "change, shared",
    [
        ({"role": "developer"}, 1),
        ({"name": "Ann"}, 1),
        ({"content": "u" * 1500 + "v" * 500}, 4),
        ({"content": [{"type": "text", "text": "u" * 1000}, {"type": "text", "text": "v"}]}, 3),
    ],
)
def test_messages_share_what_is_before_their_first_difference(change, shared):
    other = copy.deepcopy(BASE)
    other["messages"][1].update(change)
    assert common(BASE, other) == shared


def test_text_parts_are_the_text_that_they_hold():
    other = copy.deepcopy(BASE)
    other["messages"][1]["content"] = [{"type": "text", "text": "u" * 2000}]
    assert prefix_of("chat", other) == prefix_of("chat", BASE)


def test_nothing_is_hashed_from_the_first_medium_on():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    body = chat("s" * 600, [{"type": "text", "text": "u" * 500}, image], "a" * 5000)
    before = chat("s" * 600, "u" * 500)
    assert prefix_of("chat", body).hashes == prefix_of("chat", before).hashes
    assert len(prefix_of("chat", before).hashes) == 2
    assert prefix_of("chat", body).size > prefix_of("chat", before).size + 5000


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "p" * 511},
        {"prompt": ["p" * 600, "q" * 600]},
        {"prompt": [[1] * 200, [2] * 200]},
        {"prompt": "p" * 600, "truncate_prompt_tokens": 10},
        {"prompt": "p" * 600, "prompt_embeds": "AAAA"},
    ],
)
def test_prompts_without_one_long_beginning_have_no_hashes(fields):
    assert prefix_of("completions", {"model": "m", **fields}).hashes == ()


def test_a_message_without_text_is_read():
    body = chat("s" * 600)
    body["messages"].append({"role": "assistant", "tool_calls": [{"id": "1"}]})
    body["messages"].append({"role": "tool", "tool_call_id": "1", "content": "t" * 600})
    assert len(prefix_of("chat", body).hashes) == 2


def test_the_longest_prompt_costs_no_more_than_the_last_chunk():
    prompt = "p" * (CHUNK_ENDS[-1] + 1000)
    prefix = prefix_of("completions", {"model": "m", "prompt": prompt})
    assert len(prefix.hashes) == MAX_CHUNKS
    assert prefix.size == len(prompt)
    changed = {"model": "m", "prompt": prompt[:-1] + "q"}
    assert prefix_of("completions", changed) == prefix


LONG = "".join(f"Rule {number}: be kind. " for number in range(500))


def calls(*paths):
    made = [{"id": path, "type": "function", "function": {"name": path}} for path in paths]
    return {"role": "assistant", "content": None, "tool_calls": made}


@pytest.mark.parametrize("results", [1, 14])
def test_the_next_turn_has_the_hash_of_the_whole_prompt_before(results):
    asked = [{"role": "system", "content": LONG}, {"role": "user", "content": "Why?"}]
    paths = [f"file{number}.py" for number in range(results)]
    found = [{"role": "tool", "tool_call_id": path, "content": f"x = {path}"} for path in paths]
    first = prefix_of("chat", {"model": "m", "messages": asked})
    later = prefix_of("chat", {"model": "m", "messages": [*asked, calls(*paths), *found]})
    assert len(first.message_ends) == 2 and len(later.message_ends) == min(3 + results, 16)
    assert first.message_ends[-1] in later.message_ends[:-1]
    other = prefix_of("chat", {"model": "m", "messages": [asked[0], *found]})
    assert first.message_ends[-1] not in other.message_ends


def test_short_prompts_and_those_with_media_have_no_message_ends():
    user = {"role": "user", "content": "Why?"}
    whole = prefix_of("chat", chat(LONG, "Why?"))
    assert len(whole.message_ends) == 2
    shortened = prefix_of("chat", chat(LONG[:6_000], "Why?"))
    assert shortened.hashes and not shortened.message_ends
    # Only what ends far enough back has one.
    assert len(prefix_of("chat", chat("Hi.", "a" * 6_000, "b" * 6_000)).message_ends) == 1
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    pictured = {"model": "m", "messages": [{"role": "system", "content": LONG}, picture, user]}
    assert prefix_of("chat", pictured).hashes and not prefix_of("chat", pictured).message_ends
    assert not prefix_of("chat", chat("a" * CHUNK_ENDS[-1], "b")).message_ends
    assert not prefix_of("completions", {"model": "m", "prompt": LONG}).message_ends


def test_a_block_that_the_engine_leaves_out_changes_no_hash():
    def body(*system):
        blocks = [{"type": "text", "text": text} for text in system]
        return {"model": "m", "system": blocks, "messages": [{"role": "user", "content": "hi"}]}

    plain = prefix_of("messages", body("Help. " * 200))
    billed = body("x-anthropic-billing-header: cc_version=2.1.332.fb6;", "Help. " * 200)
    assert prefix_of("messages", billed) == plain != NO_PREFIX


USED = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}}
SAID = {"type": "text", "text": "Reading. " * 80}


def results(*texts):
    parts = [{"type": "text", "text": text} for text in texts]
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}


def test_calls_and_results_of_tools_are_hashed_as_text():
    """Also those of Anthropic, of which clients mark the last one for the cache."""
    begin = [{"role": "user", "content": [{"type": "text", "text": "Fix the test. " * 60}]}]
    answer = {"role": "assistant", "content": [SAID, USED]}
    result = {"role": "user", "content": [results("x = 1\n" * 200)]}
    marked = {
        "role": "user",
        "content": [{**result["content"][0], "cache_control": {"type": "ephemeral"}}],
    }
    first = prefix_of("messages", {"model": "m", "messages": [*begin, answer, marked]})
    assert len(first.hashes) == first.size // CHUNK_ENDS[0] >= 5
    later = {"model": "m", "messages": [*begin, answer, result, answer, marked]}
    assert prefix_of("messages", later).hashes[: len(first.hashes)] == first.hashes
    other = {"role": "assistant", "content": [SAID, {**USED, "input": {"path": "b.py"}}]}
    changed = prefix_of("messages", {"model": "m", "messages": [*begin, other, result]})
    assert changed.hashes[:2] == first.hashes[:2] and changed.hashes[-1] != first.hashes[-1]
    odd = [*begin, {"role": "user", "content": [{"type": ["tool_result"], "content": 5}]}]
    assert len(prefix_of("messages", {"model": "m", "messages": odd}).hashes) == 1
    # A medium in a result ends it, as any.
    seen = results("x" * 2_000)
    seen["content"].append({"type": "image", "source": {"type": "base64", "data": ""}})
    pictured = [*begin, answer, {"role": "user", "content": [seen]}]
    assert len(prefix_of("messages", {"model": "m", "messages": pictured}).hashes) == 3


def test_calls_and_results_of_tools_count_in_the_length_of_a_prompt():
    path, text = '{"path": "a.py"}', "x = 1\n" * 200
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": path}}
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": text},
    ]
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": path},
        {"type": "function_call_output", "call_id": "call_1", "output": text},
    ]
    parts = [
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [results(text)]},
    ]
    sizes = [
        measure("chat", {"messages": chat}),
        measure("responses", {"input": items}),
        measure("messages", {"messages": parts}),
    ]
    assert all(size.tokens == 2 * MESSAGE_TOKENS for size in sizes)
    assert all(len(path + text) - 10 < size.characters < len(path + text) + 60 for size in sizes)
