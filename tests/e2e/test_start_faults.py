from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from sluice.deploy.commands.options import Exit
from sluice.deploy.ray_start import free_port
from tests.e2e.conftest import wait_until
from tests.e2e.test_serve_command import environment, runs
from tests.processes import name_of, title_of

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]

SIMULATED = ("--engine", "simulated")
SLUICE = Path(sys.executable).with_name("sluice")

END_S = 10.0
"""In what time a start ends after a signal or the death of a part. Busy machines get more."""

PARTS = {
    "driver": "sluice-driver",
    "dry run": "sluice.replica.dry_run",
    "gcs_server": "gcs_server",
    "raylet": "raylet",
    "young agent": "/runtime_env/agent/main.py",
    "agent": "ray::RuntimeEnvAgent",
    "Serve controller": "ray::ServeController",
    "controller": "ray::DetachedController",
    "observer": "ray::DetachedObserver",
    "replica": "ray::ServeReplica:sluice:Replica",
    "router": "ray::ServeReplica:sluice:Router",
}
"""Their names, or what their command lines or titles hold."""


RAY_PARTS = [part for part in PARTS if part not in ("dry run", "young agent")]


RESTARTED = ("controller", "observer", "router")
"""Started again: by Ray, at once, or by Serve, where the start had just got its answer."""


class Start:
    """One `sluice serve`, and all processes that it has had."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._err = folder / "err"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self._err.open("wb") as err:
            self.process = psutil.Popen(
                [SLUICE, "serve", "--port", str(port), *(words or SIMULATED)],
                cwd=folder,
                env=environment() | {"HOME": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        self._family: dict[int, psutil.Process] = {}

    @property
    def err(self) -> str:
        return self._err.read_text()

    def look(self) -> None:
        for each in self.process.children(recursive=True):
            self._family[each.pid] = each

    def wait_for(self, part: str) -> psutil.Process:
        found: list[psutil.Process] = []

        def there() -> bool:
            assert self.process.poll() is None, self.err
            assert "Ctrl-C stops" not in self.err, f"it was ready before {part}"
            self.look()
            found[:] = [
                each
                for each in self.left()
                if PARTS[part] == name_of(each)
                # The raylet has the commands of its agents in its own.
                or (PARTS[part] in title_of(each) and name_of(each) != "raylet")
            ]
            return bool(found)

        wait_until(there, f"{part} is there", 300, lambda: self.err, every_s=0.02)
        return found[0]

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.err
            return "Ctrl-C stops" in self.err

        wait_until(ready, "it is ready", 300, lambda: self.err, every_s=0.2)
        self.look()

    def end_by_death(self, part: str, moment: str) -> None:
        self.wait_for(moment)
        self.wait_for(part).kill()

        def ended() -> bool:
            self.look()
            return self.process.poll() is not None or "Ctrl-C stops" in self.err

        wait_until(ended, "it ends, or serves", 3 * END_S, lambda: self.err)
        if part in RESTARTED and self.process.poll() is None:
            wait_until(self.answers, "it serves on", 60, lambda: self.err)
            self.process.terminate()
            assert self.wait_end() == Exit.OK
            return
        assert self.wait_end() == Exit.FAILED
        assert self.err.splitlines()[-1].startswith("Error: "), self.err
        said = self.err.rpartition("Error: ")[2]
        assert "Traceback" not in said
        assert "UNHEALTHY" not in said or " has ended" in said

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def end_by_signal(self, part: str, moment: str, number: signal.Signals) -> None:
        self.wait_for(moment)
        self.wait_for(part).suspend()
        self.process.send_signal(number)
        assert self.wait_end() == Exit.OK

    def left(self) -> list[psutil.Process]:
        return [each for each in self._family.values() if runs(each)]

    def wait_end(self) -> int:
        def ended() -> bool:
            if self.process.poll() is None:
                self.look()
                return False
            return True

        wait_until(ended, "it ends", 12 * END_S, lambda: self.err)
        assert self.left() == [], "nothing is left behind"
        return int(self.process.returncode)


@contextmanager
def start(folder: Path, *words: str) -> Iterator[Start]:
    it = Start(folder, *words)
    try:
        yield it
    finally:
        for process in (it.process, *it.left()):
            if runs(process):
                process.kill()


def _cases(*quick: tuple[str, str]) -> list[object]:
    moments = [(part, part) for part in RAY_PARTS] + [
        (part, moment)
        for part in ("driver", "gcs_server", "raylet")
        for moment in ("Serve controller", "replica", "router")
    ]
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.release) for case in moments
    ]


@pytest.mark.parametrize(
    ("part", "moment"), _cases(("gcs_server", "Serve controller"), ("replica", "replica"))
)
def test_a_start_ends_with_any_part_that_dies(tmp_path: Path, part: str, moment: str) -> None:
    with start(tmp_path) as it:
        it.end_by_death(part, moment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("part", "moment"), _cases(("raylet", "Serve controller")))
def test_a_start_with_any_part_that_hangs_ends_at_a_signal(
    tmp_path: Path, part: str, moment: str, number: signal.Signals
) -> None:
    with start(tmp_path) as it:
        it.end_by_signal(part, moment, number)


@pytest.mark.release
def test_a_start_ends_with_an_agent_that_dies_before_it_listens(tmp_path: Path) -> None:
    """Ray's node would notice after 15 s."""
    with start(tmp_path) as it:
        agent = it.wait_for("young agent")
        wait_until(lambda: time.time() - agent.create_time() > 1, "it is no news")
        agent.kill()
        assert it.wait_end() == Exit.FAILED
        assert "agent has ended before the application was ready" in it.err


@pytest.mark.release
def test_a_start_in_which_ray_is_too_slow_begins_again(tmp_path: Path) -> None:
    """Ray's node ends when an agent has not said in 15 s where it listens."""
    with start(tmp_path) as it:
        late = it.wait_for("young agent")
        late.suspend()
        it.wait_ready()
        assert re.search("busy: raylet.* before the application was ready; starting it", it.err)
        assert not runs(late)
        it.process.terminate()
        assert it.wait_end() == Exit.OK


@pytest.mark.release
def test_a_start_goes_on_when_serve_replaces_a_router_that_does_not_answer(tmp_path: Path) -> None:
    """Serve ends it after three health checks of 10 s, which a busy machine may need for it."""
    with start(tmp_path) as it:
        replica = it.wait_for("replica")
        replica.suspend()
        router = it.wait_for("router")
        wait_until(lambda: "router 1/1" in it.err, "it runs", 300, lambda: it.err)
        router.suspend()
        wait_until(lambda: not runs(router), "Serve has ended it", 300, lambda: it.err)
        replica.resume()
        it.wait_ready()
        assert "Serve has replaced 1 that did not answer" in it.err
        assert it.answers()
        it.process.terminate()
        assert it.wait_end() == Exit.OK


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", RAY_PARTS)
def test_a_start_ends_at_a_signal(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with start(tmp_path) as it:
        it.wait_for(moment)
        it.process.send_signal(number)
        if number == signal.SIGKILL:
            it.process.wait(timeout=END_S)
            wait_until(lambda: not it.left(), "nothing is left", 3 * END_S, it.left)
        else:
            assert it.wait_end() == Exit.OK


IDLE = "replica: {autoscaling: {min_replicas: 0, max_replicas: 1}}\n"
"""No replica starts at first, so vLLM is asked in another process."""


@pytest.mark.release
@pytest.mark.vllm
@pytest.mark.parametrize("replica", ["", IDLE])
def test_nothing_is_ready_before_vllm_has_been_asked(tmp_path: Path, replica: str) -> None:
    config = tmp_path / "sluice.yaml"
    config.write_text(f"engine: {{vllm_args: {{max-model-len: much}}}}\n{replica}")
    with start(tmp_path, "--config", str(config)) as it:
        assert it.process.wait(timeout=300) == Exit.FAILED
        assert "refuses them" in it.err and "max-model-len" in it.err
        assert "Ctrl-C stops" not in it.err
        asked = "replica: check the arguments" if not replica else "vLLM: asked for its arguments"
        assert f"  {asked}" in it.err
        assert replica or f"(in: {asked})" in it.err
        log = Path(it.err.rpartition("; log: ")[2].strip())
        assert log.is_dir() if replica else f"{asked} failed" in log.read_text()
        (kept,) = (each for each in log.parents if each.name == "failed_start")
        assert not kept.stat().st_mode & 0o077


@pytest.mark.release
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("supervisor", signal.SIGINT),
        ("supervisor", signal.SIGKILL),
        ("driver", signal.SIGKILL),
        ("driver", signal.SIGSTOP),
        ("dry run", signal.SIGSTOP),
    ],
)
def test_a_start_that_asks_vllm_ends_as_well(
    tmp_path: Path, part: str, number: signal.Signals
) -> None:
    config = tmp_path / "sluice.yaml"
    config.write_text(f"engine: {{vllm_args: {{max-model-len: 512}}}}\n{IDLE}")
    with start(tmp_path, "--config", str(config)) as it:
        asking = it.wait_for("dry run")
        found = {"supervisor": it.process, "dry run": asking}
        (found.get(part) or it.wait_for(part)).send_signal(number)
        if number == signal.SIGSTOP:
            it.process.send_signal(signal.SIGINT)
        if part == "supervisor" and number == signal.SIGKILL:
            it.process.wait(timeout=END_S)
            wait_until(lambda: not it.left(), "nothing is left", 3 * END_S, it.left)
        else:
            assert it.wait_end() in (Exit.OK, Exit.FAILED)
