"""The container images: linted, without root, and with every file that Sluice needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from sluice.deploy.chart import CHART
from tests.documents import ROOT
from tests.helm.chart import read

IMAGES = [ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "Dockerfile.cpu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


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
    least, _, _ = PROJECT["project"]["requires-python"].removeprefix(">=").partition(",")
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


def test_an_installed_sluice_has_every_file(tmp_path: Path) -> None:
    """What an image is built from, packed as ``pip install`` packs it, holds all of the packages:
    not only modules, but the page's files too."""
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    source = tmp_path / "source"
    source.mkdir()
    for name in allowed:
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
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    command = [sys.executable, "-c", build]
    packed = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout
    installed, theirs = tmp_path / "installed", tmp_path / "theirs"
    with zipfile.ZipFile(tmp_path / packed.splitlines()[-1]) as wheel:
        held = set(wheel.namelist())
        wheel.extractall(installed)
    assert wanted <= held, sorted(wanted - held)
    # One name, so that an environment may have a `router` or a `deploy` of its own.
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"sluice"}
    theirs.mkdir()
    for name in packages:
        (theirs / f"{name}.py").write_text("theirs = True\n")
    code = "import sluice.deploy.cli as ours, deploy, router; assert deploy.theirs, router.theirs"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; print(ours.__file__)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (theirs, installed)))},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert found.startswith(str(installed))
