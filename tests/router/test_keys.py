"""Keys as digests and from a file that changes under a running router."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from sluice.deploy.config import parse_config
from sluice.router.errors import ApiError
from sluice.router.tenancy.auth import (
    MAX_FILE_BYTES,
    ApiKey,
    KeyMetrics,
    KeyRing,
    client_of,
    parse_keys,
)
from sluice.router.tenancy.limits import Client

CLASSES = ("standard", "batch")


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def who(ring: KeyRing, key: str) -> Client | None:
    try:
        return ring.check([(b"authorization", b"Bearer " + key.encode())])
    except ApiError as error:
        assert error.reason.status == 401
        assert len(key) < 8 or key not in error.message
        return None


class Mounted:
    """A folder as Kubernetes mounts a Secret: ``keys.yaml`` is a link into ``..data``, which is a
    link to a folder of its own for each version, and is swapped as a whole."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self._versions = folder, 0
        self.swap(text)
        self.path = folder / "keys.yaml"
        self.path.symlink_to(Path("..data") / "keys.yaml")

    def swap(self, text: str) -> None:
        self._versions += 1
        version = self.folder / f"..version_{self._versions}"
        version.mkdir()
        (version / "keys.yaml").write_text(text)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.folder / "..data")


async def test_a_digest_stands_for_its_key_and_for_the_same_holder() -> None:
    clear = KeyRing([SecretStr("first-key"), ApiKey(key=SecretStr("second-key"), name="acme")])
    second = ApiKey(sha256=digest("second-key").upper(), name="acme")
    hashed = KeyRing([ApiKey(sha256=digest("first-key")), second])
    for key in ("first-key", "second-key", "third-key", "", "first-key "):
        assert who(clear, key) == who(hashed, key)
    assert who(hashed, "first-key") is not None
    assert who(hashed, digest("first-key")) is None


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ([(b"authorization", b"Bearer first-key")], True),
        ([(b"x-api-key", b"first-key")], True),
        ([(b"x-api-key", b"other-key")], False),
        ([(b"authorization", b"first-key")], False),
        # Of two it would not be clear which counts.
        ([(b"x-api-key", b"first-key"), (b"authorization", b"Bearer first-key")], False),
        ([(b"x-api-key", b"first-key"), (b"x-api-key", b"first-key")], False),
        ([], False),
    ],
)
def test_a_key_comes_in_one_of_two_headers(
    headers: list[tuple[bytes, bytes]], accepted: bool
) -> None:
    ring = KeyRing([ApiKey(key=SecretStr("first-key"), name="a")], classes=CLASSES)
    if accepted:
        assert ring.check(headers).name == "a"
    else:
        with pytest.raises(ApiError) as refused:
            ring.check(headers)
        assert refused.value.reason.status == 401


async def test_a_swapped_secret_is_taken_in_and_what_is_left_out_goes(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    mount = Mounted(tmp_path, "- {key: old-key, name: acme}\n")
    fixed = SecretStr("fixed-key")
    ring = KeyRing([fixed], mount.path, CLASSES, metrics=KeyMetrics(registry))
    assert who(ring, "fixed-key") and who(ring, "old-key")
    acme = who(ring, "old-key")

    # Both keys of one client hold while clients change over.
    mount.swap(f"- {{key: old-key, name: acme}}\n- {{sha256: {digest('new-key')}, name: acme}}\n")
    assert await ring.reload()
    assert who(ring, "old-key") == who(ring, "new-key") == acme

    mount.swap(f"- {{sha256: {digest('new-key')}, name: acme, limits: {{max_priority: 2}}}}\n")
    assert await ring.reload()
    assert who(ring, "old-key") is None
    renewed = who(ring, "new-key")
    assert renewed and renewed.caps.max_priority == 2 and renewed == ring.holder("name-acme")
    assert who(ring, "fixed-key")
    labels = {"ring": "api", "outcome": "ok"}
    assert registry.get_sample_value("sluice_key_file_loads_total", labels) == 2


async def test_a_broken_file_keeps_the_keys_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    path = tmp_path / "keys.yaml"
    path.write_text("- good-key\n")
    ring = KeyRing([], path, CLASSES, metrics=KeyMetrics(registry))

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"ring": "api", **labels})

    for broken in ("- [s3cret", "[]", "- {key: s3cret, classes: [gold]}", "- s3cret\n- s3cret"):
        path.write_text(broken)
        assert not await ring.reload()
        assert not await ring.reload()
        assert who(ring, "good-key") and who(ring, "s3cret") is None
    path.unlink()
    assert not await ring.reload()
    assert who(ring, "good-key")
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 5
    assert "s3cret" not in caplog.text
    assert sample("sluice_key_file_broken") == 1
    assert sample("sluice_key_file_loads_total", outcome="failed") == 5
    path.write_text("- good-key\n")
    assert await ring.reload()
    assert sample("sluice_key_file_broken") == 0


async def test_a_file_is_looked_into_once_and_not_by_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- good-key\n")
    ring, read, threads = KeyRing([], path, CLASSES), list[bytes](), set[int]()

    def parse(raw: bytes, classes: Collection[str] | None) -> tuple[SecretStr | ApiKey, ...]:
        read.append(raw)
        return parse_keys(raw, classes)

    def hashed(entry: SecretStr | ApiKey) -> Client:
        threads.add(threading.get_ident())
        return client_of(entry)

    monkeypatch.setattr("sluice.router.tenancy.auth.parse_keys", parse)
    monkeypatch.setattr("sluice.router.tenancy.auth.client_of", hashed)
    for text, is_good in (("- {", False), ("- {", False), ("- good-key\n- new-key\n", True)):
        path.write_text(text)
        for _ in range(2):
            assert await ring.reload() == is_good
    assert read == [b"- {", b"- good-key\n- new-key\n"]
    assert threads and threading.get_ident() not in threads


async def test_nothing_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.001)
    path = tmp_path / "keys.yaml"
    path.write_text("- good-key\n")
    ring = KeyRing([], path, CLASSES)
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail(*_: object) -> object:
        loop.call_soon_threadsafe(failed.set)
        raise RuntimeError("s3cret")

    with monkeypatch.context() as patched:
        patched.setattr("sluice.router.tenancy.auth.parse_keys", fail)
        path.write_text("- other-key\n")
        watch = asyncio.create_task(ring.watch())
        async with asyncio.timeout(120):
            await failed.wait()
    assert who(ring, "good-key")
    path.write_text("- new-key\n")
    async with asyncio.timeout(120):
        while not who(ring, "new-key"):
            assert not watch.done()
            await asyncio.sleep(0)
    watch.cancel()
    assert "failed with a RuntimeError" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a YAML list of 1 to 10000 keys"),
        ("key: s3cret", "a YAML list"),
        ("- s3cret: {", "not YAML, at line"),
        ("- {key: s3cret, name: two words}", "entry 0.object.name: Value error, must match"),
        ("- 's3cret key'", "printable ASCII"),
        ("- {s3cret: 1}", "an unknown field"),
        ("- s3cret\n- {sha256: " + digest("s3cret") + "}", "have the same key"),
        (f"- {{sha256: {digest('')}}}", "the digest of an empty key"),
        ("- \udcff", "not UTF-8"),
        ("- !!python/name:os.system s3cret", "not YAML"),
        ("- !!bool s3cret", "does not match its YAML tag"),
        ("- !!int s3cret", "does not match its YAML tag"),
    ],
)
def test_a_file_that_cannot_be_used_stops_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        KeyRing([], path, CLASSES)
    assert str(path) in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_huge_missing_or_repeating_file_stops_the_start(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(OSError, match=r"keys\.yaml"):
        KeyRing([], path)
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="more than"):
        KeyRing([], path)
    with pytest.raises(ValueError, match="absolute path"):
        parse_config({"router": {"api_keys_file": "keys.yaml"}})
    path.write_text("- one-key\n")
    with pytest.raises(ValueError, match="together have the same key"):
        KeyRing([SecretStr("one-key")], path, CLASSES)


def test_keys_that_open_no_models_have_no_caps(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: s3cret-s3cret, name: prometheus}\n")
    assert who(KeyRing([], path), "s3cret-s3cret")
    path.write_text("- {key: s3cret-s3cret, limits: {requests_per_minute: 5}}\n")
    with pytest.raises(ValueError, match="may have only key or sha256, and name"):
        KeyRing([], path)
    for name in ("metrics", "admin"):
        keys = [{"key": "s3cret-s3cret", "limits": {"requests_per_minute": 5}}]
        with pytest.raises(ValueError, match=rf"an entry of {name}\.keys may have only key or sha"):
            parse_config({"router": {name: {"keys": keys}}})


def test_short_keys_are_warned_of_without_being_shown(caplog: pytest.LogCaptureFixture) -> None:
    KeyRing([SecretStr("s3cret"), SecretStr("k" * 32), ApiKey(sha256=digest("x"))])
    assert "1 of the api keys have fewer than 20 characters" in caplog.text
    assert "s3cret" not in caplog.text


@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)))
def test_only_the_keys_of_a_file_are_accepted(keys: list[str]) -> None:
    unique = list(dict.fromkeys(keys))
    if not unique:
        return
    half = max(1, len(unique) // 2)
    text = "".join(f"- {{sha256: {digest(key)}}}\n" for key in unique[:half])
    ring = KeyRing(parse_keys(text.encode(), CLASSES))
    assert [who(ring, key) is not None for key in unique] == [
        index < half for index in range(len(unique))
    ]
