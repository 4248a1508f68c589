#!/usr/bin/env bash
# xgrammar 0.2.8 puts the text of a "pattern" into JSON without escaping it.
# Expected: {"type": "string", "pattern": "^\\n$"} allows "\n" as JSON writes it, a backslash and an n.
# Seen: it allows a bare line break between quotes, which is no JSON, and refuses the escaped one; the same
# for patterns of a quote and of a backslash. An enum with these letters is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy pydantic apache-tvm-ffi transformers
"$work/venv/bin/pip" install -q --no-deps xgrammar==0.2.8
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import json
from importlib.metadata import version

import xgrammar

END = 256
tokens = [bytes([n]) for n in range(256)] + [b"<end>"]
info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
compiler = xgrammar.GrammarCompiler(info)


def allows(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


print("xgrammar", version("xgrammar"))
for letter, pattern in (("\n", "^\\n$"), ('"', '^"$'), ("\\", "^\\\\$")):
    escaped, bare = json.dumps(letter), f'"{letter}"'
    seen = [allows({"type": "string", "pattern": pattern}, text) for text in (escaped, bare)]
    print(f"pattern {pattern}: allows {escaped}: {seen[0]}; allows {bare!r}: {seen[1]}")
    assert seen == [False, True], "the behaviour has changed"
    assert allows({"enum": [letter]}, escaped) and not allows({"enum": [letter]}, bare)
PY
