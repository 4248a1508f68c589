"""Authentication by bearer keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from pydantic import SecretStr

from sluice.router.errors import ApiError, Reason
from sluice.router.tenancy.keys import (
    WEAK_CHARACTERS,
    ApiKey,
    check_entries,
    client_of,
    digest_of,
    is_weak,
    parse_keys,
)
from sluice.router.tenancy.limits import ANYONE, Client
from sluice.router.wire import KEY_HEADERS

POLL_S = 2.0
"""Interval between reads of a key file, seconds. A removed key may be accepted for as long."""

MAX_FILE_BYTES = 4 << 20
"""Maximum size of a key file."""

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

    Only digests are kept. A key is looked up by a digest of its digest, keyed with a secret of this
    process, so a client that guesses keys controls neither the digest that its guess is compared
    with nor how long that takes. ``O(1)``, however many keys there are.

    The file is read at the start, and then by :meth:`watch`, by its path each time: a mounted
    secret is a symbolic link whose target changes. An unusable file changes nothing.

    Args:
        entries: keys from the configuration.
        file: more keys: a YAML list of such entries.
        classes: the service classes that entries may name. ``None`` for keys without limits, as
            are keys that give no access to models.
        ring: what the keys give access to, for logs and metrics.
        metrics: counts the loads of the file.

    Raises:
        ValueError: the file cannot be used; the message gives the reason, without any key.
        OSError: it cannot be read.
    """

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
        self._trouble: str | None = None
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
        """The client that sent these raw request headers (lower-case names).

        Raises:
            ApiError: 401.
        """
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
        """The client with this :attr:`~sluice.router.tenancy.limits.Client.owner`; ``None`` if it
        no longer has a key."""
        if self.accepts_anyone:
            return ANYONE if owner == ANYONE.owner else None
        return self._keys.clients.get(owner)

    async def watch(self) -> None:
        """Apply changes of the file, indefinitely. Returns at once if there is no file."""
        while self._file is not None:
            await asyncio.sleep(POLL_S)
            await self.reload()

    async def reload(self) -> bool:
        """Read the file. Returns whether its keys are now in use; if not, the reason is logged.

        Refused content is not parsed again until the file has changed.
        """
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
        self._trouble = None
        self._metrics.broken.labels(self._ring).set(0)
        return True

    def _keep(self, error: Exception) -> bool:
        """Log why the file cannot be used, once per reason."""
        # The text of any other error may contain a key.
        told = isinstance(error, ValueError | OSError)
        trouble = str(error) if told else f"reading it failed with a {type(error).__name__}"
        if trouble != self._trouble:
            self._trouble = trouble
            _log.error(
                "cannot use the key file %s; the %s keys stay unchanged: %s",
                self._file,
                self._ring,
                trouble,
            )
            self._metrics.loads.labels(self._ring, "failed").inc()
        self._metrics.broken.labels(self._ring).set(1)
        return False

    def _load(self, raw: bytes) -> _Accepted:
        """The keys of the configuration and of a file with this content.

        Raises:
            ValueError: the file cannot be used.
        """
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
    """The key or token in these raw request headers (lower-case names).

    Raises:
        ApiError: 401.
    """
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
    """The bytes of a file.

    Raises:
        ValueError: it is too large. OSError: it cannot be read.
    """
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
