"""Authentication by bearer keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.limits import ANYONE, UNNAMED, Client, TenantLimits, check_classes
from sluice.router.wire import KEY_HEADERS, LABEL

# Accepted API keys: entries of the configuration and of key files.

MAX_FILE_KEYS: Final = 10_000  # maximum number of keys in one file
WEAK_CHARACTERS: Final = 20  # a shorter key causes a warning; 22 of base64 have 128 bits
_OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKey(BaseModel, extra="forbid", frozen=True):
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
    limits: TenantLimits = Field(
        default=TenantLimits(), description="The limits of its client; default: those of the API."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        # Not left to pydantic, which quotes an unknown field: that may be a misplaced key.
        for given, known in (
            (data, cls.model_fields),
            (data.get("limits") if isinstance(data, dict) else None, TenantLimits.model_fields),
        ):
            if isinstance(given, dict) and not given.keys() <= known.keys():
                raise ValueError(f"an unknown field; allowed are {', '.join(known)}")
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

AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
_ENTRIES: TypeAdapter[tuple[SecretStr | ApiKey, ...]] = TypeAdapter(tuple[KeyEntry, ...])


def digest_of(entry: SecretStr | ApiKey) -> bytes:
    """SHA-256 of the key; it is random and long, so a slow digest would only cost time."""
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
    if entry.name is None:
        return Client(owner=f"key-{owner}", caps=entry.limits)
    return Client(entry.name, f"name-{entry.name}", entry.limits)


def check_entries(
    entries: Sequence[SecretStr | ApiKey], classes: Collection[str], where: str
) -> None:
    """Check all entries. Raises ValueError, without any key in the message."""
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
    check_classes((entry.limits for entry in named), classes, f"{where} name")


def check_bare(entries: Sequence[SecretStr | ApiKey], where: str) -> None:
    """Check a list of keys that cannot have limits. Raises ValueError."""
    for entry in entries:
        if isinstance(entry, ApiKey) and "limits" in entry.model_fields_set:
            raise ValueError(f"an entry of {where} may have only key or sha256, and name")


def parse_keys(raw: bytes, classes: Collection[str] | None) -> tuple[SecretStr | ApiKey, ...]:
    """Parse a key file: a YAML list like `router.api_keys`, without limits if ``classes`` is
    ``None``. Raises ValueError, without any key in the message."""
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


POLL_S = 2.0  # between reads of a key file; a removed key may be accepted for as long
MAX_FILE_BYTES = 4 << 20  # maximum size of a key file
_SCHEME = b"bearer "
_KEY_HEADERS = tuple(name.encode() for name in KEY_HEADERS)

_log = logging.getLogger(__name__)


class KeyMetrics:
    """Metrics of key files. ``ring`` names what the keys give access to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.broken = Gauge(
            "sluice_key_file_broken",
            "Routers that could not use the key file when they last read it, and keep the previous "
            "keys.",
            ["ring"],
            registry=registry,
        )
        self.loads = Counter(
            "sluice_key_file_loads",
            "Loads of changed key files, by outcome.",
            ["ring", "outcome"],
            registry=registry,
        )


class _Accepted(NamedTuple):
    """Lookup tables: holders by the keyed digest of the key, and clients by owner."""

    holders: dict[bytes, tuple[bytes, Client]]
    clients: dict[str, Client]
    weak: int


class KeyRing:
    """The accepted keys and their clients. A ring without keys and file accepts every request.

    Only digests are kept, looked up by a keyed digest, so that guesses control neither comparisons
    nor their time. ``O(1)``. ``classes`` is ``None`` for keys without limits. Raises OSError and
    ValueError: the file cannot be used; no key is in the message."""

    def __init__(
        self,
        entries: Iterable[SecretStr | ApiKey] = (),
        file: Path | None = None,
        classes: Collection[str] | None = None,
        ring: str = "api",
        metrics: KeyMetrics | None = None,
    ) -> None:
        self._entries = tuple(entries)
        self._file = file
        self._classes = classes
        self._ring = ring
        self._metrics = metrics or KeyMetrics(CollectorRegistry())
        self._secret = secrets.token_bytes(32)
        self._seen: bytes | None = None  # the digest of the file's last content
        self._refused: Exception | None = None  # why that content could not be used
        self._failure: str | None = None
        if file is None:
            self._take(self._accepted(self._entries))
            return
        try:
            raw = _read(file)
            self._seen = _digest(raw)
            self._take(self._load(raw))
        except ValueError as error:
            raise ValueError(f"the key file {file} cannot be used: {error}") from None
        self._metrics.broken.labels(ring).set(0)

    @property
    def accepts_anyone(self) -> bool:
        """Whether no key is needed because none is configured."""
        return self._file is None and not self._entries

    @property
    def count(self) -> int:
        """Number of accepted keys."""
        return len(self._keys.holders)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client of raw request headers (lower-case names). Raises ApiError: 401."""
        if self.accepts_anyone:
            return ANYONE
        client = self.find(bearer_of(headers))
        if client is None:
            raise unknown_key()
        return client

    def find(self, key: bytes) -> Client | None:
        """The client with this key; ``None`` if it is not accepted."""
        digest = hashlib.sha256(key).digest()
        found = self._keys.holders.get(self._place_of(digest))
        if found is None or not hmac.compare_digest(digest, found[0]):
            return None
        return found[1]

    def holder(self, owner: str) -> Client | None:
        """The client that is this ``owner``; ``None`` if it no longer has a key."""
        if self.accepts_anyone:
            return ANYONE if owner == ANYONE.owner else None
        return self._keys.clients.get(owner)

    async def watch(self) -> None:
        """Apply changes of the file, indefinitely. Returns at once if there is no file."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            await self.reload()

    async def reload(self) -> bool:
        """Read the file; whether its keys are now in use. Refused content is parsed only once."""
        assert self._file is not None
        try:
            raw = await asyncio.to_thread(_read, self._file)
            seen = _digest(raw)
            if seen == self._seen:
                return self._fine() if self._refused is None else self._keep(self._refused)
            try:
                # In a thread: thousands of entries take seconds.
                accepted = await asyncio.to_thread(self._load, raw)
            except Exception as error:
                self._seen, self._refused = seen, error
                raise
        except Exception as error:
            return self._keep(error)
        self._seen, self._refused = seen, None
        self._take(accepted)
        _log.info("reloaded the %s keys: %d are accepted", self._ring, self.count)
        self._metrics.loads.labels(self._ring, "ok").inc()
        return self._fine()

    def _fine(self) -> bool:
        self._failure = None
        self._metrics.broken.labels(self._ring).set(0)
        return True

    def _keep(self, error: Exception) -> bool:
        # The text of any other error may contain a key.
        is_safe = isinstance(error, ValueError | OSError)
        failure = str(error) if is_safe else f"reading it failed with a {type(error).__name__}"
        if failure != self._failure:
            self._failure = failure
            _log.error(
                "cannot use the key file %s; the %s keys stay unchanged: %s",
                self._file,
                self._ring,
                failure,
            )
            self._metrics.loads.labels(self._ring, "failed").inc()
        self._metrics.broken.labels(self._ring).set(1)
        return False

    def _load(self, raw: bytes) -> _Accepted:
        """The keys of configuration and file content. Raises ValueError."""
        entries = self._entries + parse_keys(raw, self._classes)
        check_entries(entries, self._classes or (), "the configuration and the file together")
        return self._accepted(entries)

    def _accepted(self, entries: tuple[SecretStr | ApiKey, ...]) -> _Accepted:
        holders = {}
        for entry in entries:
            digest = digest_of(entry)
            holders[self._place_of(digest)] = (digest, client_of(entry))
        clients = {client.owner: client for _, client in holders.values()}
        return _Accepted(holders, clients, sum(map(is_weak, entries)))

    def _take(self, accepted: _Accepted) -> None:
        self._keys = accepted
        if accepted.weak:
            _log.warning(
                "%d of the %s keys have fewer than %d characters; "
                "`sluice keys new` makes strong ones",
                accepted.weak,
                self._ring,
                WEAK_CHARACTERS,
            )

    def _place_of(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def bearer_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key or token in these raw request headers (lower-case names). Raises ApiError: 401."""
    found = [(name, value) for name, value in headers if name in (b"authorization", *_KEY_HEADERS)]
    if len(found) == 1:
        name, value = found[0]
        if name in _KEY_HEADERS:
            return value.strip()
        if value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    raise _refusal(
        "Send one header, 'Authorization: Bearer <key>', 'x-api-key: <key>' or 'api-key: <key>'."
    )


def unknown_key() -> ApiError:
    """The 401 for every key that is not accepted."""
    return _refusal("The API key is not accepted.")


def _read(path: Path) -> bytes:
    """The bytes of a file. Raises ValueError: it is too large. OSError: it cannot be read."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return raw


def _digest(raw: bytes) -> bytes:
    # Kept in place of the bytes, which may contain keys.
    return hashlib.sha256(raw).digest()


def _refusal(message: str) -> ApiError:
    return ApiError(Reason.INVALID_API_KEY, message, headers={"www-authenticate": "Bearer"})
