"""The files with exact versions and hashes: they hold what pyproject.toml asks for, and all that it
needs in turn."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.documents import ROOT

FOLDER = ROOT / "deploy" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKED = {
    ("vllm.txt",): ("vllm", "otel"),
    ("cpu.txt",): ("cpu", "otel"),
    ("cpu.txt", "test.txt"): ("cpu", "otel", "test", "bench"),
    ("cpu.txt", "test.txt", "docs.txt"): ("cpu", "otel", "test", "bench", "docs"),
}
"""The extras of pyproject.toml that files lock together."""

ON_THE_IMAGES = ROOT / "deploy" / "ray" / "requirements.txt"

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Beside torch's CPU build; text models do not use them."""

IMAGE = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}
_ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def entries(files: Iterable[str]) -> dict[str, Version]:
    """The locked versions. Every line must belong to an entry with hashes."""
    found: dict[str, Version] = {}
    for name in files:
        text = (FOLDER / name).read_text(encoding="utf-8")
        rest = _ENTRY.sub("", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
        assert not rest.strip(), f"{name}: {rest.strip()[:200]}"
        for package, version, _ in _ENTRY.findall(text):
            assert package not in found, f"{package} is there twice"
            found[package] = Version(version)
    return found


def direct(extras: Iterable[str]) -> list[Requirement]:
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for name in extras for text in optional[name])]
    return [Requirement(text) for text in texts]


def needed(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package needs, with the extras that are asked of it."""
    for text in metadata.requires(requirement.name) or ():
        need = Requirement(text)
        for extra in ("", *requirement.extras):
            if need.marker is None or need.marker.evaluate({**IMAGE, "extra": extra}):
                yield need
                break


def check(requirement: Requirement, locked: dict[str, Version]) -> None:
    name = canonicalize_name(requirement.name)
    assert name in locked, f"{requirement} is not locked: run `make lock`"
    fits = requirement.specifier.contains(locked[name], prereleases=True)
    assert fits, f"{name} {locked[name]} is locked, not {requirement}: run `make lock`"


@pytest.mark.parametrize("files", LOCKED, ids=" ".join)
def test_what_is_locked_fits_the_ranges(files: tuple[str, ...]) -> None:
    locked = entries(files)
    for requirement in direct(LOCKED[files]):
        check(requirement, locked)


@pytest.mark.parametrize("files", [each for each in LOCKED if "vllm.txt" not in each], ids=" ".join)
def test_what_is_locked_is_complete(files: tuple[str, ...]) -> None:
    """It is installed without resolving. Of packages that are installed here in another version
    nothing is known."""
    locked = entries(files)
    queue, seen = direct(LOCKED[files]), set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        check(requirement, locked)
        if is_installed(name, locked[name]):
            queue.extend(needed(requirement))
    assert len(seen) > len(locked) / 2, "most packages are installed here in the locked version"


def is_installed(name: str, version: Version) -> bool:
    try:
        return Version(metadata.version(name)) == version
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("image", ["cpu.txt", "vllm.txt"])
def test_what_comes_on_top_of_an_image_fits_it(image: str) -> None:
    locked = entries([image, str(ON_THE_IMAGES)])
    for line in ON_THE_IMAGES.with_suffix(".in").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            check(Requirement(line), locked)


def test_what_is_locked_names_no_server() -> None:
    for path in (*FOLDER.iterdir(), ON_THE_IMAGES):
        assert "://" not in path.read_text(encoding="utf-8"), path.name


def test_what_builds_sluice_is_locked() -> None:
    """Images and CI build it without the isolation that would fetch other versions."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (backend,) = tomllib.loads(text)["build-system"]["requires"]
    for files in LOCKED:
        check(Requirement(backend), entries(files))
