#!/usr/bin/env bash
# outlines_core 0.2.14 makes regular expressions of JSON schemas whose texts are no JSON.
# Expected: all texts that build_regex_from_schema's expression matches are JSON.
# Seen: 1. a "pattern" with alternatives is put between the quotes without a group: for ^yes|no$ the texts
#          are  "yes  and  no"  , each with one quote, and "yes" is refused;
#       2. a quote in a property's name is not escaped.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q outlines_core==0.2.14
"$work/venv/bin/python" - <<'PY'
import json
import re
from importlib.metadata import version

from outlines_core.json_schema import build_regex_from_schema


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


print("outlines_core", version("outlines_core"))
cases = (
    ({"type": "string", "pattern": "^yes|no$"}, ['"yes"', '"no"', '"yes', 'no"']),
    (
        {"type": "object", "properties": {'a"b': {"type": "integer"}}, "required": ['a"b']},
        ['{"a\\"b":1}', '{"a"b":1}'],
    ),
)
for schema, texts in cases:
    expression = build_regex_from_schema(json.dumps(schema))
    matched = [text for text in texts if re.fullmatch(expression, text)]
    print(json.dumps(schema), "->", expression, "matches", matched)
    assert matched == [text for text in texts if not is_json(text)], "the behaviour has changed"
PY
