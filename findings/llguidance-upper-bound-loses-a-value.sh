#!/usr/bin/env bash
# llguidance 1.7.6 does not allow a number that lies within its bounds.
# Expected: {"type": "number", "minimum": 0, "maximum": 0.75} allows 0.7. Seen: of all numbers with one
# digit after the point just 0.7 is refused, the upper bound without its last digit; 0.70 is allowed.
# The same for 1.75 and 1.7, 100.25 and 100.2. So a model under this grammar cannot give one plain answer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.7.6 numpy
"$work/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    """A token for each byte, and one for the end."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([n]) for n in range(256)] + [b"<end>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))


def allows(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.validate_tokens([b]) and matcher.consume_token(b) for b in text.encode()) and (
        matcher.is_accepting()
    )


print("llguidance", version("llguidance"))
for bound, lost in ((0.75, "0.7"), (1.75, "1.7"), (100.25, "100.2")):
    schema = {"type": "number", "minimum": 0, "maximum": bound}
    whole = lost.split(".")[0]
    tenths = [f"{whole}.{n}" for n in range(int(lost[-1]) + 1)]
    refused = [text for text in tenths if not allows(schema, text)]
    print(f"maximum {bound}: of {tenths[0]} to {tenths[-1]} refused {refused}; {lost}0 allowed: {allows(schema, lost + '0')}")
    assert refused == [lost], "the behaviour has changed"
PY
