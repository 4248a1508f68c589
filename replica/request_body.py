"""The body of a request on its way from a router to a replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_DECODER = msgspec.json.Decoder(dict[str, Any])


class RequestBody(dict[str, Any]):
    """A JSON object that is pickled as its original bytes and the changes to them.

    Pickling a list of a million token ids takes several times as long as copying its bytes. Treat
    it as read-only: :meth:`with_fields` makes a changed one.
    """

    __slots__ = ("_changed", "_raw", "_removed")

    def __init__(self, fields: Mapping[str, Any], raw: bytes) -> None:
        super().__init__(fields)
        self._raw = raw
        self._changed: dict[str, Any] = {}
        self._removed: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, raw: bytes) -> RequestBody:
        """The object in ``raw``. ``O(len(raw))``; the parser keeps Python's global lock.

        Raises:
            msgspec.DecodeError: ``raw`` is no JSON object, or a number is not finite.
            UnicodeDecodeError: it is not UTF-8.
            RecursionError: it is nested too deeply for the parser.
        """
        return cls(_DECODER.decode(raw), raw)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> RequestBody:
        """A body of parsed ``fields``."""
        return cls(fields, msgspec.json.encode(fields))

    def with_fields(self, fields: Mapping[str, Any]) -> RequestBody:
        """The body with ``fields`` in place of its own. ``O(fields)``: unchanged values (the same
        objects) are sent in the original bytes."""
        body = RequestBody(fields, self._raw)
        changed = {n: v for n, v in fields.items() if n not in self or v is not self[n]}
        kept = {n: v for n, v in self._changed.items() if n in fields}
        body._changed = kept | changed
        body._removed = self._removed | (self.keys() - fields.keys())
        return body

    @property
    def parts(self) -> tuple[bytes, Mapping[str, Any], frozenset[str]]:
        """Its serialized form: the original bytes, the changed fields, and the names of the removed
        fields."""
        return self._raw, self._changed, self._removed

    @classmethod
    def of_parts(
        cls, raw: bytes, changed: Mapping[str, Any], removed: frozenset[str]
    ) -> RequestBody:
        """The body with these :attr:`parts`.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: as :meth:`parse`.
        """
        sent = cls.parse(raw)
        fields = {name: value for name, value in sent.items() if name not in removed}
        return sent.with_fields({**fields, **changed})

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestBody.of_parts, self.parts
