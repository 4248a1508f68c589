"""Accepted API keys: entries of the configuration and of key files."""

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

from sluice.router.tenancy.limits import UNNAMED, Client, TenantLimits
from sluice.router.wire import LABEL

MAX_FILE_KEYS: Final = 10_000
"""Maximum number of keys in one file."""

WEAK_CHARACTERS: Final = 20
"""A shorter key causes a warning: 128 random bits take 22 characters of base64."""

_OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()
_BARE: Final = frozenset(("key", "sha256", "name"))
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKey(TenantLimits):
    """An accepted key or its digest, with the name and the limits of its client."""

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
        description="Name of the client in metrics, and owner of its files and batches, so that "
        "they outlive a change of the key. Null: the key itself identifies the client.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        # Not left to pydantic, which quotes an unknown field: that may be a misplaced key.
        if isinstance(data, dict) and not data.keys() <= cls.model_fields.keys():
            raise ValueError(f"an unknown field; allowed are {', '.join(cls.model_fields)}")
        return data

    @field_validator("sha256")
    @classmethod
    def _check_digest(cls, digest: str | None) -> str | None:
        if digest is not None and not _SHA256.fullmatch(digest.lower()):
            raise ValueError("must be 64 hexadecimal digits, as `sluice keys hash` prints them")
        if digest is not None and digest.lower() == _OF_NOTHING:
            raise ValueError("is the digest of an empty key")
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
    # Processes of the application have different working directories.
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def _kind_of_key(entry: Any) -> str:
    return "object" if isinstance(entry, dict | ApiKey) else "plain"


KeyEntry = Annotated[
    Annotated[SecretStr, Tag("plain")] | Annotated[ApiKey, Tag("object")],
    Discriminator(_kind_of_key),
]
"""A key alone, or with details of its client."""

KeyFile = Annotated[Path, AfterValidator(_absolute)]
"""Path of a file of keys."""

_ENTRIES: TypeAdapter[tuple[SecretStr | ApiKey, ...]] = TypeAdapter(tuple[KeyEntry, ...])


def digest_of(entry: SecretStr | ApiKey) -> bytes:
    """SHA-256 of the key. A key is random and long, so it cannot be guessed: the slow digests that
    passwords need would only cost each request time."""
    if isinstance(entry, ApiKey) and entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    text = _text_of(entry)
    assert text is not None
    return hashlib.sha256(text.encode()).digest()


def client_of(entry: SecretStr | ApiKey) -> Client:
    """The client of an accepted key."""
    # Not the digest that keys are compared by: this one names folders.
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
    """Check conditions over all entries. ``where`` names the list in messages.

    Raises:
        ValueError: a condition fails; the message contains no key.
    """
    for entry in entries:
        _check_text(_text_of(entry), where)
    if len({digest_of(entry) for entry in entries}) < len(entries):
        raise ValueError(f"two entries of {where} have the same key")
    named = [entry for entry in entries if isinstance(entry, ApiKey)]
    # A client may have two keys, so that a key can be replaced without an interruption.
    caps: dict[str, TenantLimits] = {}
    for client in (client_of(entry) for entry in named if entry.name is not None):
        if caps.setdefault(client.name, client.caps) != client.caps:
            raise ValueError(f"entries of {where} named {client.name!r} have different limits")
    unknown = {name for entry in named for name in entry.classes or ()} - set(classes)
    if unknown:
        known = ", ".join(sorted(classes))
        raise ValueError(f"{where} name unknown classes {sorted(unknown)}; known are: {known}")


def check_bare(entries: Sequence[SecretStr | ApiKey], where: str) -> None:
    """Check a list of keys that cannot have limits, as these would have no effect.

    Raises:
        ValueError: an entry has limits.
    """
    for entry in entries:
        if isinstance(entry, ApiKey) and not entry.model_fields_set <= _BARE:
            raise ValueError(f"an entry of {where} may have only key or sha256, and name")


def parse_keys(raw: bytes, classes: Collection[str] | None) -> tuple[SecretStr | ApiKey, ...]:
    """Parse the content of a key file: a YAML list like `router.api_keys`. Keys may have no limits
    if ``classes`` is ``None``.

    Raises:
        ValueError: the content is invalid; the message contains no key.
    """
    try:
        data = yaml.load(raw.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except yaml.YAMLError as error:
        # Not the parser's message: it quotes the line, which may contain a key.
        mark = getattr(error, "problem_mark", None)
        raise ValueError(
            "it is not YAML" + (f", at line {mark.line + 1}" if mark else "")
        ) from None
    except Exception:
        # A value that does not match its tag: the error is of any type and may contain a key.
        raise ValueError("a value in it does not match its YAML tag") from None
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
    """Whether a key is so short that it may be guessed; unknown, and false, for a digest."""
    text = _text_of(entry)
    return text is not None and len(text) < WEAK_CHARACTERS


_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader if the YAML package has it: the other one takes seconds for thousands of entries."""


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
