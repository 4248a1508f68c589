from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result

from sluice.controller.config import ControllerConfig
from sluice.deploy.cli import main
from sluice.deploy.commands.options import Exit
from sluice.deploy.ray_start import free_port
from sluice.protocol.messages import FaultNotice, RequestEnding
from sluice.router.admin.api import AdminService
from sluice.router.api import make_api
from sluice.router.config import AdminConfig, RouterConfig
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.models import Catalog, Model, ModelRegistry
from sluice.router.metrics.instruments import RouterMetrics
from sluice.scheduling.fleet.breaker import ReplicaFault
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from tests.controller.fleet import (
    Clock,
    ObservedController,
    decode_row,
    delta,
    free_row,
    hello,
    newer_push,
    waiting_row,
)
from tests.e2e.conftest import wait_until
from tests.router.far_side import FarController, FarSide, local_page

KEY = "an-admin-key-of-the-tests"


class Remembering(ObservedController):
    """Its replicas do not report, but remember at once that they are drained."""

    async def remembers(self, replica_id: str) -> bool | None:
        return True


class Application:
    """A router with a controller, served on a port, and a hand in what its replicas report."""

    def __init__(self, gpu_hour_price: float | None = None) -> None:
        self.port = free_port()
        self.clock = Clock()
        self.controller = Remembering(ControllerConfig(), self.clock)
        config = RouterConfig(
            api_keys=("a-key-of-a-user",), admin=AdminConfig(keys=(KEY,)), port=self.port
        )
        side, metrics = FarSide(), RouterMetrics()
        dispatcher = Dispatcher(FarController(), side, metrics, config)
        fleets = ModelRegistry([Model("m", dispatcher, Catalog(side), metrics)], metrics)
        admin_service = AdminService({"m": self.controller}, gpu_hour_price=gpu_hour_price)
        api = make_api(config, fleets, local_page(metrics), admin_service=admin_service)
        self.server = uvicorn.Server(
            uvicorn.Config(api, host="127.0.0.1", port=self.port, log_level="warning")
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self.server.serve()), daemon=True
        )

    def tell(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(timeout=120)

    def drain_of(self, replica_id: str) -> str | None:
        rows = self.tell(self.controller.snapshot())["replicas"]
        return next(row["drain"] for row in rows if row["replica_id"] == replica_id)

    def run(self, *words: str, key: str | None = KEY, typed: str | None = None) -> Result:
        variables = {"SLUICE_ADDRESS": f"http://127.0.0.1:{self.port}", "SLUICE_ADMIN_KEY": key}
        return CliRunner().invoke(main, words, env=variables, input=typed)

    @contextmanager
    def serving(self) -> Iterator[Application]:
        self.thread.start()
        wait_until(lambda: self.server.started, "it listens")
        yield self
        self.server.should_exit = True
        self.thread.join(timeout=120)
        assert not self.thread.is_alive()


@pytest.fixture
def application() -> Iterator[Application]:
    with Application().serving() as it:
        it.tell(it.controller.hello(hello("idle")))
        it.tell(it.controller.hello(hello("busy", [decode_row(1, 100), waiting_row(2, 50)])))
        yield it


def test_status_says_that_all_is_well(application: Application) -> None:
    result = application.run("status")
    assert result.exit_code == Exit.OK, result.output
    assert "2 of 2 replicas take requests, " in result.output, "no roles to tell apart"
    assert "mixed" not in result.output
    names = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert {"idle", "busy"} <= {*names}  # what `drain` takes
    shown = application.run("status").output
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert (lines["busy"][1:4], lines["idle"][1:4]) == (["fresh", "1", "1"], ["fresh", "0", "0"])
    fleet = json.loads(application.run("status", "--json").stdout)
    assert {row["replica_id"] for row in fleet["replicas"]} == {"idle", "busy"}


def test_status_shows_how_promises_are_kept(application: Application) -> None:
    assert "promises" not in application.run("status").output, "none was made"

    async def serve(number: int) -> None:
        name = f"{number:032x}"
        slo = SLO(5.0, service_class="chat")
        query = RouteQuery(number, slo, 50, request_id=name)
        await application.controller.route([query])
        if number == 1:
            moved = query._replace(key=1_000, moves_from="busy")
            await application.controller.route([moved])
        kept = number % 10 > 0
        ending = RequestEnding(name, "ok", (), 9, 0.4, 0.01, 0.5, replica_id="idle", kept=kept)
        await application.controller.push_metrics(newer_push("router", ()), [ending])

    application.tell(application.controller.drain("busy", True))
    for number in range(1, 61):
        application.tell(serve(number))
    wait_until(lambda: "promises" in application.run("status").output, "it asks again")
    lines = application.run("status").stdout.splitlines()
    found = {line.split("  ")[0]: line.split()[-5:] for line in lines}
    assert found["promises"][-3:] == ["<=p50", "<=p90", "<=p99"]
    assert found["all, level 99.0%"][:2] == found["class chat"][:2] == ["60", "90.0%"]
    assert found["class chat"][2:] == ["-", "-", "-"]
    assert found["moved"][:2] == ["1", "100.0%"]
    assert found["replica idle"] == ["60", "90.0%", "100.0%", "100.0%", "100.0%"]
    assert found["replica busy"] == ["0", "-", "-", "-", "-"]


def test_status_fails_where_no_replica_takes_requests(application: Application) -> None:
    application.clock.advance(3.0)
    result = application.run("status")
    assert result.exit_code == Exit.FAILED
    assert "no replica of m takes requests" in result.stderr
    assert "busy of m takes no new requests: it has not reported" in result.stdout
    assert "silent for 3.0s" in result.stdout


def test_late_replicas_take_requests_as_a_last_resort(application: Application) -> None:
    """The fleet's own rule: where none is fresh, aged ones are chosen, and nothing is promised."""
    application.clock.advance(1.5)
    result = application.run("status")
    assert result.exit_code == Exit.FAILED
    assert "nothing is guaranteed" in result.stderr and "no replica" not in result.stderr
    assert "2 of 2 replicas take requests (2 only as a last resort)" in result.stdout
    assert "aged 1.5s" in result.stdout and "silent for 1.5s" in result.stdout


def test_one_late_replica_is_no_failure(application: Application) -> None:
    application.clock.advance(1.5)
    application.tell(application.controller.hello(hello("idle")))
    result = application.run("status")
    assert result.exit_code == Exit.OK, result.output
    assert "2 of 2 replicas take requests (1 only as a last resort)" in result.stdout
    assert "busy of m is chosen only if no other is left" in result.stdout


def test_a_quarantined_replica_is_shown_with_its_reason_and_what_comes_next(
    application: Application,
) -> None:
    def status_shows(words: str) -> None:
        wait_until(lambda: words in application.run("status").output, f"status says {words!r}")

    notices = [FaultNotice("busy", ReplicaFault.HUNG)]
    application.tell(application.controller.faulted(1, notices))
    application.clock.advance(0.4)
    status_shows("busy of m is in quarantine: it hangs, for 0.4s; it is tried again in 0.6s")
    shown = application.run("status").output
    assert {"quarantined", "hung"} <= set(shown.split())
    assert "2 of 2 replicas take requests (1 only as a last resort)" in shown
    application.clock.advance(0.6)
    application.tell(application.controller.hello(hello("idle")))
    application.tell(application.controller.hello(hello("busy")))
    status_shows("busy of m is in quarantine: it hangs, for 1.0s; one request at a time tries it")
    for name in ("idle", "busy"):
        application.tell(application.controller.hello(hello(name)._replace(hung=True)))
    status_shows("it gets no requests until it says that it works")
    result = application.run("status")
    assert result.exit_code == Exit.FAILED
    assert "in quarantine: they take requests, and nothing is guaranteed" in result.stderr


def test_roles_are_shown_where_there_are_any(application: Application) -> None:
    application.tell(application.controller.hello(hello("first", role="prefill")))
    application.tell(application.controller.hello(hello("second", role="decode")))
    shown = application.run("status")
    assert shown.exit_code == Exit.OK, shown.output
    assert "(1 of 1 decode, 2 of 2 mixed, 1 of 1 prefill)" in shown.stdout
    lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.strip()}
    assert lines["first"][1:3] == ["prefill", "fresh"]
    assert lines["second"][1:3] == ["decode", "fresh"]

    assert application.run("drain", "second", "--no-wait").exit_code == Exit.OK
    shown = application.run("status")
    assert shown.exit_code == Exit.OK, shown.output
    assert "no decode replica of m takes requests: others serve them whole" in shown.stdout


def test_an_idle_replica_is_drained_at_once_and_taken_back(application: Application) -> None:
    result = application.run("drain", "idle", "--json")
    assert result.exit_code == Exit.OK, result.output
    assert json.loads(result.stdout) == {"replica_id": "idle", "draining": True, "left": 0}
    assert "idle of m takes no new requests: an operator" in application.run("status").stdout
    assert application.run("drain", "idle", "--undo").stdout == "idle takes requests again\n"
    assert application.drain_of("idle") is None
    unknown = application.run("drain", "nobody")
    assert unknown.exit_code == Exit.FAILED and "no replica 'nobody'" in unknown.stderr


def test_the_last_replica_is_drained_only_by_one_who_means_it(application: Application) -> None:
    application.run("drain", "busy", "--no-wait")
    for typed in (None, "", "n\n", "what\n"):
        refused = application.run("drain", "idle", typed=typed)
        assert refused.exit_code == Exit.FAILED
        assert "last replica of its model" in refused.stderr and "503" in refused.stderr
        assert "--yes" in refused.stderr and not refused.stdout
        assert application.drain_of("idle") is None
    assert application.run("drain", "idle", typed="y\n").exit_code == Exit.OK
    assert application.drain_of("idle") == "operator"
    application.run("drain", "idle", "--undo")
    sure = application.run("drain", "idle", "--yes", "--json")
    assert (sure.exit_code, sure.stderr) == (Exit.OK, "")
    assert application.drain_of("idle") == "operator"


def test_drain_waits_until_the_replica_is_empty(application: Application) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(application.run, "drain", "busy")
        wait_until(lambda: application.drain_of("busy") is not None, "it is closed")
        assert not waiting.done()
        epoch = application.tell(application.controller.snapshot())["epoch"]
        gone = delta("busy", epoch, 1, {0: free_row(), 1: free_row()}, finished=(1, 2))
        application.tell(application.controller.report(gone))
        result = waiting.result(timeout=120)
    assert result.exit_code == Exit.OK, result.output
    assert "busy is empty" in result.stdout
    assert "2 requests left" in result.stderr


def test_drain_says_when_it_takes_too_long(application: Application) -> None:
    result = application.run("drain", "busy", "--timeout", "0.001")
    assert result.exit_code == Exit.TIMED_OUT
    assert "--undo" in result.stderr
    assert application.drain_of("busy") == "operator", "it stays closed"


def test_drain_says_when_somebody_takes_it_back(application: Application) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(application.run, "drain", "busy")
        wait_until(lambda: application.drain_of("busy") is not None, "it is closed")
        application.tell(application.controller.drain("busy", False))
        result = waiting.result(timeout=120)
    assert result.exit_code == Exit.FAILED
    assert "the drain was undone" in result.stderr


@pytest.mark.parametrize("key", [None, "wrong", "a-key-of-a-user"])
@pytest.mark.parametrize("words", [("status",), ("drain", "idle")])
def test_only_an_admin_key_opens_it(
    application: Application, words: tuple[str, ...], key: str | None
) -> None:
    result = application.run(*words, key=key)
    assert result.exit_code == Exit.REFUSED, result.output
    assert "SLUICE_ADMIN_KEY" in result.stderr
    assert result.stderr.count("\n") == 1
    assert application.drain_of("idle") is None


def test_nothing_there() -> None:
    result = CliRunner().invoke(main, ["status", "--address", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == Exit.UNREACHABLE
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("status", "--address", "head:8000"), "http://HOST:PORT"),
        (("status", "--key", "two words"), "printable ASCII"),
        (("drain",), "REPLICA"),
        (("drain", "a/../b"), "letters, digits"),
        (("drain", "one", "--timeout", "-1"), "x>0"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(words: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == Exit.USAGE
    assert says in result.stderr
    assert "two words" not in result.stderr
