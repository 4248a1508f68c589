"""The requests that both servers get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A request."""

    method: str
    path: str
    body: Any = None

    @property
    def model(self) -> str:
        named = self.body if isinstance(self.body, dict) else BASES.get(self.path, {})
        return "embedder" if named.get("model") == "embedder" else "local"

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.body}"


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_RESPONSE_TOOL = {"type": "function", **_TOOL["function"]}  # type: ignore[dict-item]
_MESSAGE_TOOL = {"name": "weather", "input_schema": _TOOL["function"]["parameters"]}  # type: ignore[index]
_NAMED = {"type": "function", "function": {"name": "weather"}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
_JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
_SAID = [{"role": "user", "content": "Say hello."}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "local",
        "messages": _SAID,
        "max_tokens": 4,
        "temperature": 0,
    },
    "/v1/completions": {"model": "local", "prompt": "One, two,", "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"model": "local", "input": "Hi.", "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": {"model": "local", "messages": _SAID, "max_tokens": 4, "temperature": 0},
    "/v1/messages/count_tokens": {"model": "local", "messages": _SAID},
    "/tokenize": {"model": "local", "prompt": "hello there"},
    "/detokenize": {"model": "local", "tokens": [40, 41, 42]},
    "/v1/embeddings": {"model": "embedder", "input": "a red car"},
    "/pooling": {"model": "embedder", "input": "a red car"},
    "/classify": {"model": "embedder", "input": "a red car"},
    "/score": {"model": "embedder", "queries": "a red car", "documents": ["a cat", "the sea"]},
    "/rerank": {"model": "embedder", "query": "a red car", "documents": ["a cat", "the sea"]},
}

_SAMPLING: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 2.5, "seed": 5},
    {"temperature": -1},
    {"temperature": "hot"},
    {"temperature": None, "seed": 5},
    {"top_p": 0},
    {"top_p": 0.5, "seed": 1, "temperature": 1},
    {"top_p": 2},
    {"top_k": 5},
    {"top_k": -2},
    {"top_k": "x"},
    {"model": "unknown"},
    {"model": 5},
    {"model": "embedder-of-nobody"},
    {"stream": "yes"},
    {"user": "u" * 600},
    {"user": 5},
    {"unknown_field": 1},
    {"cache_salt": "s"},
    {"cache_salt": ""},
    {"vllm_xargs": {"a": 1}},
    {"vllm_xargs": {"a": None}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"service_tier": "gold"},
]
_OPENAI: list[dict[str, Any]] = [
    {"max_tokens": 16.0},
    {"max_tokens": 16.5},
    {"max_tokens": -1},
    {"max_tokens": "4"},
    {"max_tokens": True},
    {"max_tokens": None, "stop": [" ", "e", "0", "a"]},
    {"max_tokens": 100_000},
    {"n": 2, "temperature": 1, "seed": 3},
    {"n": 2, "stream": True, "temperature": 1, "seed": 3},
    {"n": 0},
    {"n": 2},
    {"stop": "e"},
    {"stop": ["e", "o"], "include_stop_str_in_output": True},
    {"stop": [1]},
    {"stop": ""},
    {"stop_token_ids": [5]},
    {"presence_penalty": 1, "frequency_penalty": 1},
    {"presence_penalty": 3},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0},
    {"min_tokens": 2},
    {"min_tokens": 9},
    {"min_p": 0.1},
    {"logit_bias": {"5": 100}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"9999999": 1}},
    {"seed": "x"},
    {"seed": 2**70},
    {"ignore_eos": True},
    {"bad_words": ["hello"]},
    {"allowed_token_ids": [5, 6]},
    {"allowed_token_ids": []},
    {"skip_special_tokens": False},
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True},
    {"truncate_prompt_tokens": 2},
    {"truncate_prompt_tokens": -5},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 32},
    {"response_format": _JSON, "max_tokens": 32},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": "json"},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[ab]{2}"}},
    {"structured_outputs": {"regex": "(", "choice": ["a"]}},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream": True, "stream_options": {"include_usage": None}},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "temperature": "hot"},
    {"stream": True, "model": "unknown"},
    {"stream": True, "allowed_token_ids": []},
    {"stream": True, "structured_outputs": {"regex": "("}},
    {"prompt_cache_key": "k" * 600},
    {"add_special_tokens": False},
    {"n": 17, "temperature": 1},
    {"use_beam_search": True, "n": 2},
    {"request_id": "r"},
    {"priority": 1},
    {"kv_transfer_params": {}},
]
_FIELDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        *_SAMPLING,
        *_OPENAI,
        {"max_tokens": 0},
        {"max_completion_tokens": 3},
        {"max_completion_tokens": 0},
        {"messages": _PARTS},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *_SAID]},
        {"messages": [{"role": "developer", "content": "Be brief."}, *_SAID]},
        {
            "messages": [*_SAID, {"role": "assistant", "content": "Hel"}],
            "continue_final_message": True,
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
                    ],
                }
            ]
        },
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 2, "stream": True},
        {"logprobs": True, "top_logprobs": 50},
        {"logprobs": 5},
        {"top_logprobs": 2},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": -3},
        {"echo": True},
        {"tools": [_TOOL]},
        {"tools": [_TOOL], "tool_choice": "none"},
        {"tools": [_TOOL], "tool_choice": None},
        {"tools": [_TOOL], "tool_choice": _NAMED, "max_tokens": 32},
        {"tools": [_TOOL], "tool_choice": _NAMED, "max_tokens": 32, "stream": True},
        {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 48},
        {"tools": [_TOOL], "tool_choice": "sometimes"},
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": []},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "extreme"},
        {"parallel_tool_calls": None},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"title": "t", "text": "x"}]},
        {"add_generation_prompt": False},
    ],
    "/v1/completions": [
        *_SAMPLING,
        *_OPENAI,
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 0, "echo": True, "logprobs": 2},
        {"max_tokens": 0, "echo": True, "logprobs": 0},
        {"max_tokens": 0, "echo": True, "logprobs": 1, "stream": True},
        {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": ["One,", "Two, three"]},
        {"max_tokens": 0.0, "echo": True},
        {"echo": True},
        {"echo": True, "stream": True},
        {"echo": True, "logprobs": 1},
        {"logprobs": 2},
        {"logprobs": 2, "stream": True},
        {"logprobs": -1},
        {"logprobs": 50},
        {"prompt_logprobs": 1},
        {"suffix": "end"},
        {"prompt": [5, 6, 7]},
        {"prompt": [5.0, 6.0]},
        {"prompt": [[5, 6], [7]]},
        {"prompt": ["a", "b"]},
        {"prompt": ["a", "b"], "stream": True},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": [9_999_999]},
        {"prompt": [-1]},
        {"prompt": 5},
        {"best_of": 2},
        {"n": 17},
    ],
    "/v1/responses": [
        *_SAMPLING,
        {"max_output_tokens": 16.0},
        {"max_output_tokens": 0},
        {"max_output_tokens": "x"},
        {"background": None},
        {"background": None, "stream": True},
        {"truncation": None},
        {"parallel_tool_calls": None},
        {"tool_choice": None},
        {"reasoning": None},
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": "low"}},
        {"text": None},
        {"text": {"format": None}},
        {"text": {"format": {"type": "text"}}},
        {
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
            "max_output_tokens": 32,
        },
        {"instructions": "Be brief."},
        {"instructions": "Be brief.", "stream": True},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"include": ["nothing"]},
        {"top_logprobs": 2},
        {"truncation": "auto"},
        {"truncation": "never"},
        {"store": False},
        {"input": []},
        {"input": 5},
        {"input": [{"role": "user", "content": "Hi."}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi."}]}]},
        {
            "input": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "x"}],
                },
                {"role": "user", "content": "Hi."},
            ]
        },
        {"tools": [_RESPONSE_TOOL]},
        {
            "tools": [_RESPONSE_TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 32,
        },
        {
            "tools": [_RESPONSE_TOOL],
            "tool_choice": "required",
            "max_output_tokens": 48,
            "stream": True,
        },
        {"tools": [{"type": "magic"}]},
        {"prompt_cache_key": "k" * 600},
        {"max_tool_calls": 1},
        {"background": True},
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"stop": "e"},
    ],
    "/v1/messages": [
        *[each for each in _SAMPLING if not each.keys() & {"user", "seed"}],  # it has neither
        {"max_tokens": 16.0},
        {"max_tokens": 0},
        {"max_tokens": "4"},
        {"max_tokens": None},
        {"thread": {"type": "create"}},
        {"messages": _PARTS},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {
            "messages": [
                *_SAID,
                {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
                *_SAID,
            ]
        },
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."}]},
        {"system": 5},
        {"stop_sequences": ["e"]},
        {"stop_sequences": [5]},
        {"stop_sequences": ["e"], "stream": True},
        {"tools": [_MESSAGE_TOOL]},
        {
            "tools": [_MESSAGE_TOOL],
            "tool_choice": {"type": "tool", "name": "weather"},
            "max_tokens": 32,
        },
        {
            "tools": [_MESSAGE_TOOL],
            "tool_choice": {"type": "tool", "name": "weather"},
            "max_tokens": 32,
            "stream": True,
        },
        {"tools": [_MESSAGE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 48},
        {"tools": [{"name": "x"}]},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"service_tier": "standard_only"},
        {"metadata": {"user_id": "u"}},
        {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}, "max_tokens": 32},
    ],
    "/v1/messages/count_tokens": [
        {},
        {"system": "Be brief."},
        {"tools": [_MESSAGE_TOOL]},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"model": "unknown"},
        {"thinking": None},
    ],
    "/tokenize": [
        {},
        {"add_special_tokens": False},
        {"return_token_strs": True},
        {"prompt": None, "messages": _SAID},
        {"prompt": 5},
        {"model": "unknown"},
        {"model": None},
    ],
    "/detokenize": [{}, {"tokens": []}, {"tokens": ["x"]}, {"tokens": [-1]}, {"tokens": [5.0]}],
    "/v1/embeddings": [
        {},
        {"input": ["a", "b"]},
        {"input": [5, 6]},
        {"input": [[5, 6], [7]]},
        {"input": []},
        {"input": ""},
        {"input": 5},
        {"input": None, "messages": _SAID},
        {"encoding_format": "base64"},
        {"encoding_format": "float"},
        {"encoding_format": None},
        {"encoding_format": "hex"},
        {"dimensions": "x"},
        {"dimensions": 4},
        {"dimensions": None},
        {"user": "u" * 600},
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": "x"},
        {"use_activation": False},
        {"add_special_tokens": "x"},
        {"model": "unknown"},
    ],
    "/pooling": [
        {},
        {"input": ["a", "b"]},
        {"task": "embed"},
        {"task": "x"},
        {"encoding_format": "base64"},
    ],
    "/classify": [{}],
    "/score": [
        {},
        {"queries": ["a", "b"]},
        {"queries": None, "text_1": "a", "text_2": "b", "documents": None},
        {"documents": []},
        {"documents": 5},
        {"truncate_prompt_tokens": "x"},
        {"top_n": 1},
        {"model": "unknown"},
    ],
    "/rerank": [
        {},
        {"top_n": 1},
        {"top_n": "x"},
        {"return_documents": False},
        {"documents": []},
        {"query": 5},
    ],
}
_ALIASES = ("/v1/score", "/v1/rerank", "/v2/rerank")
_OF_OTHER_MODELS = ("/classify",)
"""Where vLLM has no route, as its model has no use for it."""

_PATHS = (
    *(path for path in BASES if path not in _OF_OTHER_MODELS),
    *("/v1/models", "/health", "/ping", "/version", "/metrics", "/nowhere", "/v1/nowhere", "/v1"),
    *("/v1/messages/batches", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"),
)


def rows() -> Iterator[Row]:
    """Some 550 requests."""
    for path, fields in _FIELDS.items():
        for changed in fields:
            yield Row("POST", path, {**BASES[path], **changed})
    for path in _ALIASES:
        yield Row("POST", path, BASES[path[3:]])
    for path in ("/v1/embeddings", "/score", "/pooling"):
        yield Row("POST", path, {**BASES[path], "model": "local"})
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"):
        yield Row("POST", path, {**BASES[path], "model": "embedder"})
    for path, body in BASES.items():
        if path in _OF_OTHER_MODELS:
            continue
        yield Row("POST", path, {"model": body["model"]})
        for malformed in ("", "[]", "null", "{", "\ufeff[]", "x"):
            yield Row("POST", path, malformed)
    for path in _PATHS:
        for method in ("GET", "HEAD", "DELETE", "PUT"):
            yield Row(method, path)
    for path in ("/ping", "/nowhere", "/health", "/v1/models", "/v1/responses/resp_1/cancel"):
        yield Row("POST", path)
