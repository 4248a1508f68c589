from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

INSTEAD = {
    r"(?:no|any|some)body": "the part that is meant: a client, a router, a replica",
    r"for ever": "indefinitely, or the bound",
    r"(?:stand(?:s|ing)?|stood) still": "stall, hang, be unresponsive",
    r"whosesoever": "of any client",
    r"in vain": "without success",
    r"(?:is|are|was|were) told": "receives, learns, is reported",
    r"hand(?:s|ed)? on": "forward",
    r"drown(?:s|ed|ing)?": "be overloaded",
    r"(?:go(?:es|ing)?|went) on": "continue, resume",
    r"(?:com(?:e|es)|came) again": "retry",
    r"as ever": "as before",
    r"so many": "this many, n",
    r"anew": "again, from scratch",
    r"hand-?over|handoff": "KV transfer, KV handle",
    r"could not be had": "cannot be fetched, failed",
}
"""Phrase, as a regular expression, and what to write instead."""

_PHRASE = "|".join(INSTEAD).replace(" ", r"(?: +|[ ]*\n[ ]*(?:# )?)")
_PHRASES = re.compile(rf"(?<![\w`])(?:{_PHRASE})(?![\w`])", re.IGNORECASE)
NAMES_INSTEAD = {
    r"in_vain": "without success",
    r"shunned": "excluded",
    r"CURED|UNLEARN\w*|MIN_LOST|MORE_THAN_BORNE": "what the number bounds",
    r"[Ww]itness": "decision inputs",
    r"[Ww]orthier": "of more worth per second",
    r"Voices": "messages",
    r"[Ll]eash|Caps": "limits",
    r"Suspect": "stalled replica, suspected request",
    r"ToldError": "the error that is stated",
    r"_?[Vv]erdicts?": "decision, result",
    r"_?hear|_Heard": "receive, on_*; message",
    r"_?told(?:_s)?(?= *[:=(])": "reply, answer",
    r"Trouble(?:Notice)?": "ReplicaFault, FaultNotice",
    r"_?(?:LEAST|MOST)_[A-Z]\w*": "MIN_, MAX_",
    r"Ways?|Case": "what the value is: route, kind, outcome",
}
"""Names in code, as regular expressions, that a reader had to decode, and what to write instead."""

_NAMES = re.compile(rf"(?<![\w`])(?:{'|'.join(NAMES_INSTEAD)})(?![\w`])")
_FOLDERS = ("router", "controller", "replica", "scheduling", "simulation", "benchmarks", "deploy")
_FOLDERS += ("protocol", "telemetry", "helm", "docs")
_KINDS = {".py", ".md", ".yaml", ".yml", ".tpl", ".html", ".js", ".lua"}


def texts() -> list[Path]:
    """Every source and document, but tests."""
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in (*found, *ROOT.glob("*.md")) if path.suffix in _KINDS)


def hits(text: str) -> list[tuple[int, str]]:
    """Line and phrase of every phrase of the list, also of one that is broken over two lines."""
    return [(text.count("\n", 0, m.start()) + 1, m.group()) for m in _PHRASES.finditer(text)]


def test_sources_and_documents_hold_no_phrase_of_the_list() -> None:
    paths = texts()
    assert len(paths) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(phrase.split())!r}"
        for path in paths
        for line, phrase in hits(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_names_in_code_are_the_fields_terms() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r}"
        for path in texts()
        if path.suffix == ".py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in _NAMES.finditer(line)
    ]
    assert not found, "\n".join(found)


_INSTALLED = re.compile(r"pip install [^`\n]*?\b(sluice[\w-]*)|\b(sluice[\w-]*)\[[a-z][\w, -]*\]")


def test_what_is_installed_is_this_project() -> None:
    """Another project has the name `sluice` in the package index."""
    names = [
        (path.name, *found)
        for path in texts()
        for found in _INSTALLED.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 10
    assert all("sluice-serve" in found for found in names), names


@pytest.mark.parametrize(
    "text",
    [
        "Nobody waits.",
        "it goes\n    on",
        "# it stands\n# still",
        "KV hand-over",
        "handover",
        "Computed anew.",
    ],
)
def test_the_check_sees_a_phrase(text: str) -> None:
    assert len(hits(text)) == 1


@pytest.mark.parametrize("text", ["going only", "`for ever`", "renewed", "told", "the board"])
def test_the_check_lets_other_words_pass(text: str) -> None:
    assert hits(text) == []
