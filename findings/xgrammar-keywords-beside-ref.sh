#!/usr/bin/env bash
# xgrammar 0.2.8 drops the keywords that stand beside $ref or anyOf, and says nothing.
# Expected (JSON Schema 2019-09 and later): both hold, so that 4 is no text of
#   {"$ref": "#/$defs/count", "minimum": 5, "$defs": {"count": {"type": "integer"}}}
# Seen: 4 is allowed; the same for "minimum" beside anyOf, and for "required" in an anyOf beside "properties",
# which is how a schema says "one of these keys". For oneOf and allOf it at least logs a warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy pydantic apache-tvm-ffi transformers jsonschema==4.26.0
"$work/venv/bin/pip" install -q --no-deps xgrammar==0.2.8
"$work/venv/bin/python" - 2>"$work/log" <<'PY'
import json
from importlib.metadata import version

import jsonschema
import xgrammar

END = 256
tokens = [bytes([n]) for n in range(256)] + [b"<end>"]
info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
compiler = xgrammar.GrammarCompiler(info)


def allows(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


print("xgrammar", version("xgrammar"))
integer = {"type": "integer"}
for schema, text in (
    ({"$ref": "#/$defs/count", "minimum": 5, "$defs": {"count": integer}}, "4"),
    ({"anyOf": [integer], "minimum": 5}, "4"),
    ({"type": "object", "properties": {"a": integer}, "anyOf": [{"required": ["a"]}]}, "{}"),
):
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"{json.dumps(schema)}: {text} valid: {valid}; allowed: {allows(schema, text)}")
    assert not valid and allows(schema, text), "the behaviour has changed"
PY
! grep -i "warning.*\(ref\|anyOf\)" "$work/log"
