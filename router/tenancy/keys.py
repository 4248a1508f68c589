"""Accepted API keys as configuration and key files give them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from router.tenancy.limits import UNNAMED, Client, TenantLimits
from router.wire import LABEL

MAX_FILE_KEYS: Final = 10_000
"""Most keys in one file."""

WEAK_CHARACTERS: Final = 20
"""A shorter key is warned of: 128 random bits take 22 characters of base64."""

_OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()
_BARE: Final = frozenset(("key", "sha256", "name"))
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKey(TenantLimits):
    """An accepted key or its digest, the name that it goes by, and the caps of who holds it."""

    key: SecretStr | None = Field(
        default=None,
        description="The key: printable ASCII without spaces. Either this or `sha256`.",
    )
    sha256: str | None = Field(
        default=None,
        description="SHA-256 of the key, 64 hexadecimal digits, in place of the key itself: "
        "`sluice keys hash` makes it.",
    )
    name: str | None = Field(
        default=None,
        description="What the client is called in metrics, and what its files and batches are kept "
        "under, so that they outlive a change of the key. Null: the key itself stands for it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        # Not left to pydantic, which names an unknown field: it may be a key in the wrong place.
        if isinstance(data, dict) and not data.keys() <= cls.model_fields.keys():
            raise ValueError(f"an unknown field; allowed are {', '.join(cls.model_fields)}")
        return data

    @field_validator("sha256")
    @classmethod
    def _check_digest(cls, digest: str | None) -> str | None:
        if digest is not None and not _SHA256.fullmatch(digest.lower()):
            raise ValueError("must be 64 hexadecimal digits, as `sluice keys hash` prints them")
        if digest is not None and digest.lower() == _OF_NOTHING:
            raise ValueError("is that of no key at all")
        return None if digest is None else digest.lower()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and (name == UNNAMED or not LABEL.fullmatch(name)):
            raise ValueError(f"must match {LABEL.pattern} and not be {UNNAMED!r}")
        return name

    @model_validator(mode="after")
    def _check_one(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        return self


def _absolute(path: Path) -> Path:
    # Processes of the application have working directories of their own.
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def _kind_of_key(entry: Any) -> str:
    return "object" if isinstance(entry, dict | ApiKey) else "plain"


KeyEntry = Annotated[
    Annotated[SecretStr, Tag("plain")] | Annotated[ApiKey, Tag("object")],
    Discriminator(_kind_of_key),
]
"""A key alone, or with more about who holds it."""

KeyFile = Annotated[Path, AfterValidator(_absolute)]
"""Path of a file of keys."""

_ENTRIES: TypeAdapter[tuple[SecretStr | ApiKey, ...]] = TypeAdapter(tuple[KeyEntry, ...])


def digest_of(entry: SecretStr | ApiKey) -> bytes:
    """SHA-256 of the key. A key is random and long, so nobody can find it by trying: the slow
    digests that passwords need would only cost each request time."""
    if isinstance(entry, ApiKey) and entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    text = _text_of(entry)
    assert text is not None
    return hashlib.sha256(text.encode()).digest()


def client_of(entry: SecretStr | ApiKey) -> Client:
    """Who holds an accepted key."""
    # Another digest than the one that keys are compared by: this one names folders.
    owner = hashlib.blake2b(digest_of(entry), digest_size=16, person=b"sluice-owner").hexdigest()
    if isinstance(entry, SecretStr):
        return Client(owner=f"key-{owner}")
    caps = TenantLimits(**entry.model_dump(include=set(TenantLimits.model_fields)))
    if entry.name is None:
        return Client(owner=f"key-{owner}", caps=caps)
    return Client(entry.name, f"name-{entry.name}", caps)


def check_entries(
    entries: Sequence[SecretStr | ApiKey], classes: Collection[str], where: str
) -> None:
    """Check what a single entry does not show. ``where`` names the list in messages.

    Raises:
        ValueError: what is wrong, without any key.
    """
    for entry in entries:
        _check_text(_text_of(entry), where)
    if len({digest_of(entry) for entry in entries}) < len(entries):
        raise ValueError(f"two entries of {where} have the same key")
    named = [entry for entry in entries if isinstance(entry, ApiKey)]
    # Two keys of one client are how a key is changed without a gap.
    caps: dict[str, TenantLimits] = {}
    for client in (client_of(entry) for entry in named if entry.name is not None):
        if caps.setdefault(client.name, client.caps) != client.caps:
            raise ValueError(f"entries of {where} share the name {client.name!r}, not the caps")
    unknown = {name for entry in named for name in entry.classes or ()} - set(classes)
    if unknown:
        known = ", ".join(sorted(classes))
        raise ValueError(f"{where} name classes {sorted(unknown)} that are not of: {known}")


def check_bare(entries: Sequence[SecretStr | ApiKey], where: str) -> None:
    """Check the keys of something that knows no caps: one that is set would mean nothing.

    Raises:
        ValueError: an entry has some.
    """
    for entry in entries:
        if isinstance(entry, ApiKey) and not entry.model_fields_set <= _BARE:
            raise ValueError(f"an entry of {where} has only key or sha256, and name")


def parse_keys(raw: bytes, classes: Collection[str] | None) -> tuple[SecretStr | ApiKey, ...]:
    """The entries in the bytes of a key file: a YAML list, as `router.api_keys` is one. Keys
    without caps where ``classes`` is ``None``.

    Raises:
        ValueError: what is wrong, without any key.
    """
    try:
        data = yaml.load(raw.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except yaml.YAMLError as error:
        # Not what the parser says: it shows the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        raise ValueError(
            "it is not YAML" + (f", at line {mark.line + 1}" if mark else "")
        ) from None
    except Exception:
        # A tagged value that is none of its kind: the error is of any type and may hold a key.
        raise ValueError("a value in it is not of the type that its tag says") from None
    if not isinstance(data, list) or not 1 <= len(data) <= MAX_FILE_KEYS:
        raise ValueError(f"it must hold a YAML list of 1 to {MAX_FILE_KEYS} keys")
    try:
        entries = _ENTRIES.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        at = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"entry {at}: {first['msg']}") from None
    if classes is None:
        check_bare(entries, "the file")
    check_entries(entries, classes or (), "the file")
    return entries


def is_weak(entry: SecretStr | ApiKey) -> bool:
    """Whether a key is so short that it may be guessed; of a digest nobody can tell."""
    text = _text_of(entry)
    return text is not None and len(text) < WEAK_CHARACTERS


_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C where the YAML package has it: thousands of entries take the other one seconds."""


def _text_of(entry: SecretStr | ApiKey) -> str | None:
    key = entry.key if isinstance(entry, ApiKey) else entry
    return None if key is None else key.get_secret_value()


def _check_text(text: str | None, where: str) -> None:
    if text is None:
        return
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{where} must be printable ASCII without spaces, and not empty")
    if not text.strip("*"):
        raise ValueError(
            f"an entry of {where} consists of asterisks only: that is the mask which "
            "`sluice config` prints in place of a key; give the key itself"
        )
