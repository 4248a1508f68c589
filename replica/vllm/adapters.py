"""LoRA adapters that are loaded and unloaded while an engine serves, from a directory.

Each subfolder with an ``adapter_config.json`` is loaded at the next look or first request. After
its removal new requests get vLLM's answer for an unknown model, and it is unloaded when the last
one has ended. A name whose files are replaced is refused: the engine keeps KV by the name."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from vllm.logger import init_logger

from sluice.protocol.errors import RequestError
from sluice.replica.config import EngineConfig
from sluice.replica.engine import ConfigurationError

logger = init_logger(__name__)

LOOK_S: Final = 2.0  # Time between two looks at the directory, seconds


MAX_REMEMBERED: Final = 10_000
"""Maximum number of names under which adapters are loaded in the life of an engine."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Names, sizes, times and inodes of an adapter's files: tools may keep times, and inodes recur."""


class DirectoryAdapters:
    """Keeps an engine's adapters as its directory has them. ``taken``: names that they must not
    have; ``in_use``: whether a request is live for which ``ensure`` returned this number."""

    def __init__(
        self,
        directory: Path,
        llm: Any,
        models: Any,
        taken: frozenset[str],
        most: int,
        in_use: Callable[[int], bool],
    ) -> None:
        self._directory = directory
        self._llm = llm
        self._models = models
        self._taken = taken
        self._most = most
        self._in_use = in_use
        # vLLM's number of each adapter that it has.
        self._loaded: dict[str, int] = {}
        self._leaving: dict[int, str] = {}
        # What is loaded and what was loaded under each name, what could not be, and what was logged
        # last.
        self._stamps: dict[str, Stamp] = {}
        self._digests: dict[str, str] = {}
        self._hashed: dict[str, tuple[Stamp, str | None]] = {}
        self._failed: dict[str, tuple[Stamp, str]] = {}
        self._logged: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the loaded files by adapter, also of a replaced one, which is not served."""
        present = self._loaded.keys() | self._logged.keys()
        return {name: digest for name, digest in self._digests.items() if name in present}

    async def start(self) -> None:
        """Load the directory, and follow it. Raises ConfigurationError: it cannot be read."""
        try:
            await self.update()
        except OSError as error:
            raise ConfigurationError(f"adapters_dir cannot be read: {error}") from error
        self._following = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Do not follow it any longer."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.update()
            except Exception:
                logger.exception("cannot follow the adapters in %s", self._directory)

    async def update(self) -> None:
        """Load and unload what the directory says now. Raises OSError: it cannot be read."""
        async with self._lock:
            found = await asyncio.to_thread(lambda: dict(folders(self._directory)))
            for name in [name for name in self._loaded if found.get(name) != self._stamps[name]]:
                if name in found:
                    if await self._digest(name, found[name]) == self._digests[name]:
                        self._stamps[name] = found[name]  # the same files again
                        continue
                    logger.warning("the files of the adapter %s were replaced; unloading it", name)
                self._models.lora_requests.pop(name, None)
                self._leaving[self._loaded.pop(name)] = name
            await self._unload()
            for known in (self._failed, self._logged, self._hashed):
                for name in known.keys() - found.keys():
                    del known[name]
            for name, stamp in sorted(found.items()):
                if name not in self._loaded:
                    await self._load(name, stamp)

    async def ensure(self, name: object) -> int:
        """Load the adapter ``name``; its number, by which it counts as in use, or 0 if the
        directory has none. Raises RequestError: 503; it cannot be loaded now."""
        if not isinstance(name, str) or name in self._taken or not _NAME.fullmatch(name):
            return 0
        if name in self._loaded:
            return self._loaded[name]
        async with self._lock:
            stamp = await asyncio.to_thread(stamp_of, self._directory / name)
            if stamp is not None and name not in self._loaded:
                await self._unload()
                why = await self._load(name, stamp)
                if why is not None:
                    raise RequestError(
                        f"The adapter {name!r} is not loaded: {why}.",
                        "model",
                        503,
                    )
        return self._loaded.get(name, 0)

    async def _unload(self) -> None:
        for number in [number for number in self._leaving if not self._in_use(number)]:
            await self._llm.remove_lora(number)
            logger.info("unloaded the adapter %s", self._leaving.pop(number))

    async def _load(self, name: str, stamp: Stamp) -> str | None:
        """Load an adapter. Returns why it is not loaded, which is logged once."""
        why = await self._refusal(name, stamp) or await self._try(name, stamp)
        if why is not None and self._logged.get(name) != why:
            logger.warning("the adapter %s is not loaded: %s", name, why)
            self._logged[name] = why
        return why

    async def _try(self, name: str, stamp: Stamp) -> str | None:
        from vllm.lora.request import LoRARequest

        digest = await self._digest(name, stamp)
        if digest is None:
            return "its files cannot be read"
        number = self._models.lora_id_counter.inc(1)
        request = LoRARequest(name, number, str(self._directory / name))
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            why = f"vLLM cannot load it: {str(error)[:500]}"
            self._failed[name] = stamp, why
            return why
        if await asyncio.to_thread(stamp_of, self._directory / name) != stamp:
            await self._llm.remove_lora(number)
            return "its files changed while it was loaded"
        self._stamps[name], self._digests[name] = stamp, digest
        self._loaded[name] = number
        self._models.lora_requests[name] = request
        logger.info("loaded the adapter %s", name)
        return None

    async def _digest(self, name: str, stamp: Stamp) -> str | None:
        known = self._hashed.get(name)
        if known is None or known[0] != stamp:
            digest = await asyncio.to_thread(digest_of, self._directory / name)
            known = self._hashed[name] = stamp, digest
        return known[1]

    async def _refusal(self, name: str, stamp: Stamp) -> str | None:
        if name in self._taken:
            return "the model or a configured adapter has this name"
        before = self._digests.get(name)
        if before is not None and before != await self._digest(name, stamp):
            # KV of prompts is cached by the adapter's name.
            return "other files were loaded under this name before; use a new name"
        if len(self._digests) >= MAX_REMEMBERED and before is None:
            return f"{MAX_REMEMBERED} names were in use since this replica has started"
        failed, why = self._failed.get(name, (None, ""))
        if failed == stamp:
            return why
        held = len(self._loaded) + len(self._leaving)
        if held >= self._most:
            return f"{held} adapters of the directory are loaded, as many as max-loras allows"
        return None


def directory_adapters(config: EngineConfig, llm: Any, models: Any) -> DirectoryAdapters:
    """Those of an engine with a configured directory; see :class:`DirectoryAdapters`."""
    assert config.adapters_dir is not None
    return DirectoryAdapters(
        config.adapters_dir.expanduser(),
        llm,
        models,
        frozenset((config.served_name, *config.adapters)),
        llm.vllm_config.lora_config.max_loras - len(config.adapters),
        lambda number: any(call.adapter == number for call in llm.calls.values()),
    )


def folders(directory: Path) -> Iterator[tuple[str, Stamp]]:
    """Names and stamps of the adapters in a directory. Raises OSError: it cannot be read."""
    for number, path in enumerate(directory.iterdir()):
        if number >= 10_000:
            return
        stamp = stamp_of(path) if _NAME.fullmatch(path.name) else None
        if stamp is not None:
            yield path.name, stamp


def stamp_of(folder: Path) -> Stamp | None:
    """The stamp of the adapter in a folder; ``None`` if there is none."""
    try:
        if not (folder / "adapter_config.json").is_file():
            return None
        files = sorted((path.name, path.stat()) for path in folder.iterdir())
        return tuple(
            (name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            for name, stat in files
        )
    except OSError:  # it is just being moved
        return None


def digest_of(folder: Path) -> str | None:
    """SHA-256 of file names and contents, equal on every node; ``None``: they are unreadable."""
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.name}\0{content}\n".encode())
    except OSError:
        return None
    return digest.hexdigest()
