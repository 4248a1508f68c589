#!/usr/bin/env bash
# llguidance 1.7.6 writes another number than the one a JSON schema names.
# Expected: {"const": N} allows the text of N. Seen: numbers pass through binary floats of 16 digits
# at most, so that N of 9007199254740993 (2^53 + 1, or any id of 19 digits) becomes ...992, and
# 123456789.12345679 becomes 123456789.1234568. Nothing is reported.
# It matters where an id stands in an enum of a response's schema: the reply names another object.
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
for right, seen in (("9007199254740993", "9007199254740992"), ("123456789.12345679", "123456789.1234568")):
    schema = {"const": json.loads(right)}
    print(f"const {right}: allows {right}: {allows(schema, right)}; allows {seen}: {allows(schema, seen)}")
    assert json.loads(right) != json.loads(seen)
    assert not allows(schema, right) and allows(schema, seen), "the behaviour has changed"
assert allows({"const": 9007199254740991}, "9007199254740991")
PY
