#!/usr/bin/env bash
# mistral-common 1.13.1: with tools, a conversation's prompt is no prefix of the prompt of its next question, so that
# prefix caches, and routers that go by them, lose the conversation from the previous question on.
# Expected: as without tools, each prompt starts with the whole prompt before it, up to the answer's end.
# Seen (tokenizers v2, v3, v7): the list of tools stands before the last question, and moves there with each one. Of a
#       prompt with tools of some 1,200 tokens, a follow-up shares what was before the first question: one token.
#       v2 leaves out also the tool calls and results before the last question; v3 and v7 keep them.
#       While a loop of tool calls runs without a new question, its prompts do grow at the end only.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'mistral-common[sentencepiece]==1.13.1'
cd "$work"
"$work/venv/bin/python" - <<'PY'
from importlib.metadata import version

from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

print("mistral-common", version("mistral-common"))
parameters = {"type": "object", "properties": {"path": {"type": "string", "description": "a file of the project"}}}
tools = [Tool(function=Function(name=f"read_{n}", description="reads", parameters=parameters)) for n in range(20)]
call = ToolCall(id="abcdefghi", function=FunctionCall(name="read_1", arguments='{"path": "notes"}'))
first = [UserMessage(content="What do the notes say?")]
loop = [*first, AssistantMessage(tool_calls=[call]), ToolMessage(content="a plan", tool_call_id="abcdefghi", name="read_1")]
second = [*loop, AssistantMessage(content="They hold a plan."), UserMessage(content="Which?")]


def shared(tokenizer, before, after, tools):
    """(tokens of the prompt before, tokens that the next prompt begins with as well)"""
    before, after = (
        tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=tools)).tokens
        for messages in (before, after)
    )
    return len(before), next((n for n, (a, b) in enumerate(zip(before, after)) if a != b), len(before))


for name in ("v2", "v3", "v7"):
    tokenizer = getattr(MistralTokenizer, name)()
    chat = [*first, AssistantMessage(content="A plan."), UserMessage(content="Which?")]
    plain, calls, question = (shared(tokenizer, *case) for case in ((first, chat, None), (first, loop, tools), (loop, second, tools)))
    text = tokenizer.encode_chat_completion(ChatCompletionRequest(messages=second, tools=tools)).text
    kept = "[TOOL_CALLS]" in text and "notes" in text.split("[TOOL_CALLS]")[1]
    print(f"{name}: prompt, of it shared by the next: without tools {plain}, tool's result {calls}, question {question}; calls kept: {kept}")
    assert plain[0] == plain[1] and calls[0] == calls[1], "the behaviour has changed"
    assert question[0] > 500 and question[1] == 1 and kept == (name != "v2"), "the behaviour has changed"
PY
