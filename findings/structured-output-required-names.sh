#!/usr/bin/env bash
# Two libraries of structured output take a JSON schema and then refuse each text that obeys it.
# The schema requires a key that "properties" does not list, which JSON Schema allows:
#   {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
# Expected: {"b": 1} is allowed and {"a": 1} is not, or an error.
# Seen: outlines_core 0.2.14 allows {"a": 1} and refuses each object with "b", with no error;
#       lm-format-enforcer 0.11.3 allows neither: after {"a": 1 no text ends.
#       llguidance 1.7.6 is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q outlines_core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.7.6 numpy
"$work/venv/bin/python" - <<'PY'
import json
import re
import string
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from lmformatenforcer import JsonSchemaParser
from lmformatenforcer.characterlevelparser import CharacterLevelParserConfig
from outlines_core.json_schema import build_regex_from_schema

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
TEXTS = ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}']


class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([n]) for n in range(256)] + [b"<end>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


def by_outlines(text):
    return bool(re.fullmatch(build_regex_from_schema(json.dumps(SCHEMA)), text))


def by_enforcer(text):
    parser = JsonSchemaParser(SCHEMA, config=CharacterLevelParserConfig(alphabet=string.printable))
    for letter in text:
        if letter not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(letter)
    return parser.can_end()


def by_llguidance(text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar)
    return all(matcher.validate_tokens([b]) and matcher.consume_token(b) for b in text.encode()) and (
        matcher.is_accepting()
    )


seen = {}
for package, allows in (
    ("outlines_core", by_outlines),
    ("lm-format-enforcer", by_enforcer),
    ("llguidance", by_llguidance),
):
    seen[package] = [text for text in TEXTS if allows(text)]
    print(package, version(package), "allows", seen[package])
assert seen == {
    "outlines_core": TEXTS[:1],
    "lm-format-enforcer": [],
    "llguidance": TEXTS[1:],
}, "the behaviour has changed"
PY
