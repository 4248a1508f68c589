"""Which conversation a request is a turn of, by the names that clients send, or by its first tool
call."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice, takewhile
from typing import Any, Final, NamedTuple

from sluice.protocol.requests import Endpoint, Turn, tool_key
from sluice.router import wire
from sluice.router.errors import invalid, shown

MAX_SESSION_CHARACTERS = 512
"""Longest name of a session in a header, and of a tool loop. Names in bodies, which are hashed
only, are bounded as bodies are."""


class SessionName(NamedTuple):
    """A header or body field that names a session.

    ``within``: header with the name of a sub-agent, unique in the session; ``parent``: header with
    the session that a sub-agent's session belongs to. A ``shared`` name may cover several
    conversations, such as all those of a person: it says what they count for, but it is no identity
    of a loop. Requests of one name go ``together``, unless it may cover all of a tenant."""

    name: str
    within: str = ""
    parent: str = ""
    shared: bool = False
    together: bool = True


SESSION_HEADERS: Final = (
    SessionName(wire.SESSION_HEADER),
    # Claude Code; its main agent sends no agent id.
    SessionName("x-claude-code-session-id", within="x-claude-code-agent-id"),
    # Codex CLI: a thread of its own for each sub-agent, the root's has the session's id.
    SessionName("session-id", within="thread-id"),
    SessionName("session_id"),  # earlier versions
    SessionName("x-qwen-code-session-id"),
    SessionName("x-session-affinity", parent="x-parent-session-id"),  # OpenCode
    SessionName("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    SessionName("x-session-id", parent="x-parent-session-id"),  # Ray Serve LLM, sgl-router
    # llm-d and, deprecated, Gateway API: a program there, but gateways set a tenant as well.
    SessionName("x-llm-d-inference-fairness-id", shared=True, together=False),
    SessionName("x-gateway-inference-fairness-id", shared=True, together=False),
)
SESSION_FIELDS: Final = (
    SessionName(f"{wire.SLO_FIELD}.{wire.LOOP}.id"),
    SessionName("metadata.user_id", shared=True),  # Anthropic's; of Claude Code with the session
    SessionName("prompt_cache_key", shared=True),  # OpenAI's: requests with alike prompts
    SessionName("safety_identifier", shared=True),  # OpenAI's: a person
    SessionName("user", shared=True),  # OpenAI's, deprecated there: a person
)
"""The names of sessions in order of precedence, all headers before all fields."""

FINAL_HEADER: Final = "x-dynamo-session-final"
"""Dynamo's: whether its session ends with this request."""

_SHARED: Final = {each.name for each in (*SESSION_HEADERS, *SESSION_FIELDS) if each.shared}

CALL: Final = "tool_call"
"""What the answer names where the first tool call identifies the conversation."""

_CLAUDE_SESSION = re.compile(r'(?:_session_|"session_id": ?")([0-9a-fA-F-]{32,36})(?:"|$)')
"""In the user's id that Claude Code makes, JSON or, earlier, ``user_..._session_UUID``. Gateways
hand it on as OpenAI's ``user``."""

_COUNTED_ID = re.compile(r"[a-z_.:-]*[0-9]{0,6}")
_MIN_ID_CHARACTERS = 9


class Recognised(NamedTuple):
    """A request's turn, ``None`` for a plain request; the answer's ``x-sluice-session``: the names
    by which it was recognised, with short hashes of their values; and the key of the requests that
    it goes together with, 0: none."""

    turn: Turn | None = None
    header: str = ""
    affinity: int = 0

    @property
    def loop(self) -> int:
        """The session whose tool loop it is in, of a sub-agent its parent's; 0: unknown."""
        if self.turn is None or not self.turn.session:
            return 0
        shared = self.header.partition("=")[0] in _SHARED
        return self.turn.session if shared else self.turn.program


class SessionReader:
    """Recognises sessions; ``headers`` of the configuration name conversations and go first after
    Sluice's own. A request with none of ``headers`` and ``fields``, and no ``slo.loop``, names no
    session."""

    def __init__(self, headers: Iterable[str] = ()) -> None:
        own, *others = SESSION_HEADERS
        self._names = (own, *map(SessionName, headers), *others)
        self.headers = frozenset(each.name.encode() for each in self._names)
        self.fields = frozenset(each.name.partition(".")[0] for each in SESSION_FIELDS[1:])

    def read(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        headers: Sequence[tuple[bytes, bytes]],
        owner: str,
    ) -> Recognised:
        """What a validated body and raw headers (lower-case names) say. Keys are distinct per
        owner. ``O(headers + messages)``. Raises ApiError: 400."""
        session = program = 0
        apart = False
        said: list[tuple[str, int]] = []
        # All are checked, the first one counts.
        for name, value in list(self._given(body, headers))[:1]:
            program = _key(owner, value)
            said.append((name.name, program))
            session = 0 if name.shared else program
            apart = not name.together
            if name.within and (agent := _header(name.within, headers)) not in ("", value):
                session = _key(owner, value, agent)
                said.append((name.within, session))
            elif name.parent and (parent := _header(name.parent, headers)) not in ("", value):
                program = _key(owner, parent)
                said.append((name.parent, program))
        tools = body.get("tools")
        if tools and not session and (call := _first_call(endpoint, body)):
            session = _key(owner, call)
            said.append((CALL, session))
        tool = tool_of(endpoint, body) if tools else 0
        if not (program or session or tool):
            return Recognised()
        header = ", ".join(f"{name}={short(key)}" for name, key in said)
        final = session > 0 and _is_final(headers)
        turn = Turn(session, program or session, tool, final=final)
        return Recognised(turn, header, session if apart else turn.program)

    def _given(
        self, body: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]]
    ) -> Iterable[tuple[SessionName, str]]:
        """The names in the request, in order of precedence."""
        sent = self.headers.intersection([name for name, _ in headers])
        for name in self._names if sent else ():
            if name.name.encode() in sent and (value := _header(name.name, headers)):
                yield name, value
        for name in SESSION_FIELDS:
            if value := _field(name.name, body):
                short_name = len(value) <= MAX_SESSION_CHARACTERS
                found = _CLAUDE_SESSION.search(value) if short_name else None
                yield (name, value) if found is None else (name._replace(shared=False), found[1])


def short(key: int) -> str:
    """A key as it is shown to people."""
    return f"{key:016x}"[:12]


def _header(name: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The value of a header, empty if there is none. Raises ApiError: 400."""
    values = [value for each, value in headers if each == name.encode()]
    if len(values) > 1:
        raise invalid(f"{name} must be given once", name)
    value = values[0].decode("latin-1").strip() if values else ""
    if len(value) > MAX_SESSION_CHARACTERS:
        raise invalid(
            f"{name} must have at most {MAX_SESSION_CHARACTERS} characters, got {len(value)}", name
        )
    return value


def _is_final(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    value = _header(FINAL_HEADER, headers).lower()
    if value not in ("", "true", "false"):
        raise invalid(f"{FINAL_HEADER} must be true or false, got {shown(value)}", FINAL_HEADER)
    return value == "true"


def _field(name: str, body: Mapping[str, Any]) -> str:
    value: Any = body
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{name} must be a string, got {shown(value)}", name.partition(".")[0])
    return value


def _key(owner: str, *names: str) -> int:
    """A 63-bit key of what has these names, distinct per owner; never 0."""
    return hash_of("\n".join((owner, *names)), b"sluice-session") or 1


def hash_of(name: str, kind: bytes) -> int:
    """A 63-bit hash of a name, distinct per ``kind``."""
    digest = hashlib.blake2b(
        name.encode(errors="surrogatepass"), digest_size=8, person=kind
    ).digest()
    return int.from_bytes(digest, "big") >> 1


# The first tool call of a conversation identifies it at every router: the client sends it with
# each later turn, and its id is random, so conversations that share their system prompt, or even
# the first question, have different ones. A conversation whose beginning the client drops to make
# room is another one, as it is to the prefix cache.


def _first_call(endpoint: Endpoint, body: Mapping[str, Any]) -> str:
    """The id of the conversation's first tool call; empty if there is none, or if it may have been
    counted (``functions.read:0``) instead of drawn."""
    call = next(_calls(endpoint, body), {})
    number, name = call.get("call_id") or call.get("id"), _name(call)
    if not isinstance(number, str) or len(number) < _MIN_ID_CHARACTERS or name in number:
        return ""
    return "" if _COUNTED_ID.fullmatch(number) else number


def _calls(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if endpoint == "responses":
        items = body["input"]
        yield from (item for item in _dicts(items) if str(item.get("type")).endswith("_call"))
        return
    for message in body.get("messages") or ():
        if message.get("role") == "assistant":
            yield from _called(message)


def _called(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls in an assistant's message, of OpenAI's or of Anthropic's API."""
    return _dicts(message.get("tool_calls")) or [
        part for part in _dicts(message.get("content")) if part.get("type") == "tool_use"
    ]


def tool_of(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """The key of the tools whose results end a validated conversation; 0: none do.
    ``O(messages of the last turn)``."""
    if endpoint == "responses":
        if not isinstance(body["input"], list):
            return 0
        items = list(dropwhile(_is_notice, reversed(body["input"])))
        results = [_call_id(item) for item in takewhile(_is_output, items)]
        if not results:
            return 0
        before, ids = islice(items, len(results), None), set(results)
        calls = takewhile(lambda item: not _is_output(item), before)
        return tool_key(_name(item) for item in calls if _call_id(item) in ids)
    messages = dropwhile(_is_notice, reversed(body.get("messages") or ()))
    if not _brings_results(next(messages, {})):
        return 0
    called = next((_called(each) for each in messages if each.get("role") == "assistant"), [])
    return tool_key(map(_name, called))


def _is_notice(message: Mapping[str, Any]) -> bool:
    """What an agent says to the model after a tool's result: Claude Code's reminders."""
    return message.get("role") in ("system", "developer")


def _is_output(item: Mapping[str, Any]) -> bool:
    return str(item.get("type")).endswith("_call_output")


def _call_id(item: Mapping[str, Any]) -> str:
    number = item.get("call_id")
    return number if isinstance(number, str) else ""


def _brings_results(message: Mapping[str, Any]) -> bool:
    """OpenAI's role for a result, or a part of a message of Anthropic's."""
    return message.get("role") == "tool" or any(
        part.get("type") == "tool_result" for part in _dicts(message.get("content"))
    )


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _name(call: Mapping[str, Any]) -> str:
    """The tool of a call in any API; built-in tools have no name but that of the call's type."""
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    return str(named.get("name") or call.get("type"))
