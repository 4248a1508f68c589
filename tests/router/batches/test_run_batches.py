"""Batches from upload to results, with the official client, through restarts and among routers, and
the completion windows that are promised for them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from sluice.router.batches.lines import MAX_MODELS, Checked, check_lines
from sluice.router.batches.run import LinePlaces
from sluice.router.batches.state import BatchState, FileRecord
from sluice.router.batches.store import NAME
from sluice.router.config import DAY_S, RouterConfig, ServiceClass
from sluice.router.tenancy.auth import ApiKey
from sluice.router.tenancy.limits import ANYONE, TenantLimits
from sluice.scheduling.placement.windows import SPANS_S, Leftover
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, Tier
from sluice.scheduling.request.objective import SLO
from tests.router.batches.routers import (
    KEY,
    OTHER_KEY,
    URL,
    Held,
    Served,
    UnixClock,
    config,
    line,
    names_in,
    results,
    rows,
    said,
    serving,
    submit,
    until,
    until_true,
    upload,
)
from tests.router.far_side import FarSide, answer, serve

NAMES = [f"line-{number}" for number in range(6)]


def ids(entries: list[dict[str, object]]) -> list[object]:
    return [entry["custom_id"] for entry in entries]


async def test_a_batch_is_run_as_best_effort_and_gives_its_results(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as router:
        client = router.client
        made = await submit(client, map(line, NAMES), metadata={"for": "tests"})
        assert (made.status, made.object, made.endpoint) == ("validating", "batch", URL)
        assert made.expires_at == made.created_at + DAY_S
        done = await until(client, made.id, "completed", "failed")
        assert done.status == "completed"
        assert done.metadata == {"for": "tests"}
        counts = done.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (6, 6, 0)
        assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
        assert done.error_file_id is None and done.errors is None
        output = await results(client, done.output_file_id)
        assert sorted(ids(output)) == NAMES
        for entry in output:
            assert entry["error"] is None
            response = entry["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"][0]["message"]["content"] == "one two three"
        sent = {response["response"]["request_id"] for response in output}
        calls = [request for _, request in router.edge.side.calls]
        assert sent == {request.request_id for request in calls}
        assert all(request.best_effort for request in calls)
        asked = {query.tiers for query in router.edge.controller.queries}
        assert asked == {frozenset({Tier.BEST_EFFORT})}
        assert {request.slo for request in calls} == {SLO(priority=1, service_class="batch")}
        assert router.edge.sample("sluice_batches_total", status="completed") == 1
        assert router.edge.sample("sluice_batch_lines_total", outcome="ok") == 6
        labels = {"class": "batch", "outcome": "ok", "endpoint": "chat"}
        assert router.edge.sample("sluice_requests_total", **labels) == 6


async def test_completions_run_too(tmp_path: Path) -> None:
    url = "/v1/completions"
    async with serving(config(tmp_path)) as router:
        made = await submit(router.client, [line("a", url)], url)
        await until(router.client, made.id, "completed")
        assert [request.endpoint for _, request in router.edge.side.calls] == ["completions"]


async def test_what_the_api_would_refuse_is_refused_line_by_line(tmp_path: Path) -> None:
    lines = [
        line("good"),
        line("streamed", stream=True),
        line("looped", slo={"loop": {"id": "a", "deadline_ms": 1}}),
        line("many", n=1_000),
        line("hasty", slo={"ttft_ms": -1}),
        line("classless", slo={"class": "none"}),
        line("own", slo={"class": "interactive"}),
    ]
    async with serving(config(tmp_path)) as router:
        done = await until(router.client, (await submit(router.client, lines)).id, "completed")
        counts = done.request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (2, 5)
        assert sorted(ids(await results(router.client, done.output_file_id))) == ["good", "own"]
        errors = {
            entry["custom_id"]: entry["response"]
            for entry in await results(router.client, done.error_file_id)
        }
        assert {name: each["body"]["error"]["param"] for name, each in errors.items()} == {
            "streamed": "stream",
            "looped": "slo.loop",
            "many": "n",
            "hasty": "slo.ttft_ms",
            "classless": "slo.class",
        }
        assert {each["status_code"] for each in errors.values()} == {400}
        classes = {request.slo.service_class for _, request in router.edge.side.calls}
        assert classes == {"batch", "interactive"}


async def test_an_engines_refusal_is_an_error_of_its_line(tmp_path: Path) -> None:
    body = b'{"error": {"message": "no such model", "code": 404}}'
    async with serving(config(tmp_path), FarSide(a=answer(404, body))) as router:
        done = await until(
            router.client, (await submit(router.client, [line("a")])).id, "completed"
        )
        (entry,) = await results(router.client, done.error_file_id)
        assert entry["response"]["status_code"] == 404
        assert entry["response"]["body"] == json.loads(body)
        assert done.output_file_id is None


async def test_a_router_that_starts_goes_on_where_another_stopped(tmp_path: Path) -> None:
    settings = config(tmp_path, max_lines_in_flight=2)
    first = FarSide(a=Held(3))
    async with serving(settings, first) as router:
        made = await submit(router.client, map(line, NAMES))
        await first.until(lambda: len(first.calls) == 5)
        before = await until(router.client, made.id, "in_progress")
    assert before.output_file_id is None
    assert not first.live, "what was under way has been stopped"
    second = FarSide(a=serve)
    async with serving(settings, second) as router:
        done = await until(router.client, made.id, "completed")
        assert sorted(ids(await results(router.client, done.output_file_id))) == NAMES
        assert done.request_counts is not None and done.request_counts.completed == 6
    assert Counter(said(first.calls)[:3] + said(second.calls)) == Counter(NAMES)


async def test_routers_share_a_folder_and_run_each_batch_once(tmp_path: Path) -> None:
    settings = config(tmp_path, max_running=1, max_lines_in_flight=1)
    sides = [FarSide(a=serve), FarSide(a=serve)]
    async with serving(settings, sides[0]) as one, serving(settings, sides[1]) as two:
        made = [
            await submit(router.client, [line(f"{number}-{name}") for name in NAMES])
            for number in range(3)
            for router in (one, two)
        ]
        for batch in made:
            done = await until(two.client, batch.id, "completed")
            assert await until(one.client, batch.id, "completed") == done
            assert len(await results(one.client, done.output_file_id)) == len(NAMES)
    lines = Counter(said(sides[0].calls) + said(sides[1].calls))
    assert set(lines.values()) == {2}, "each line is in two batches"


async def test_cancelling_stops_what_is_under_way_and_keeps_what_is_done(tmp_path: Path) -> None:
    side = FarSide(a=Held(2))
    async with serving(config(tmp_path), side) as one:
        made = await submit(one.client, map(line, NAMES))
        await side.until(lambda: len(side.live) == len(NAMES) - 2)
        # At a router that does not run it.
        async with serving(config(tmp_path)) as two:
            asked = await two.client.batches.cancel(made.id)
            assert asked.status in ("cancelling", "cancelled") and asked.cancelling_at is not None
            done = await until(two.client, made.id, "cancelled")
        assert done.cancelled_at is not None
        assert not side.live
        output = await results(one.client, done.output_file_id)
        errors = await results(one.client, done.error_file_id)
        assert sorted(ids(output) + ids(errors)) == NAMES
        assert len(output) == 2
        assert {entry["error"]["code"] for entry in errors} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled any more"):
            await one.client.batches.cancel(made.id)


async def test_what_is_left_at_the_end_of_the_window_expires(tmp_path: Path) -> None:
    side, now = FarSide(a=Held(2)), UnixClock()
    async with serving(config(tmp_path), side, now) as router:
        made = await submit(router.client, map(line, NAMES))
        await side.until(lambda: len(side.live) == len(NAMES) - 2)
        now.now_s += DAY_S
        done = await until(router.client, made.id, "expired")
        errors = await results(router.client, done.error_file_id)
        assert {entry["error"]["code"] for entry in errors} == {"batch_expired"}
        assert len(await results(router.client, done.output_file_id)) == 2
        assert done.request_counts is not None and done.request_counts.failed == 4
        assert router.edge.sample("sluice_batch_lines_total", outcome="expired") == 4


async def test_a_batch_that_nobody_could_run_expires_too(tmp_path: Path) -> None:
    side, now = FarSide(a=Held(0)), UnixClock()
    async with serving(config(tmp_path, max_running=1), side, now) as router:
        first = await submit(router.client, [line("a")])
        await side.until(lambda: bool(side.live))
        second = await submit(router.client, [line("b")])
        now.now_s += DAY_S
        await until(router.client, first.id, "expired")
        await until(router.client, second.id, "expired")
        assert said(side.calls) == ["a"]


async def test_each_key_gets_its_turn(tmp_path: Path) -> None:
    side = FarSide(a=Held(0))
    settings = config(tmp_path, [KEY, OTHER_KEY], max_running=2, max_lines_in_flight=2)
    async with serving(settings, side) as router:
        for number in range(3):
            await submit(router.of(KEY), [line(f"mine-{number}")])
        await side.until(lambda: len(side.live) == 2)
        last = await submit(router.of(OTHER_KEY), [line("other")])
        mine = [batch async for batch in router.of(KEY).batches.list()]
        running = [batch for batch in mine if batch.status == "in_progress"]
        await router.of(KEY).batches.cancel(running[0].id)
        await side.until(lambda: "other" in said(side.calls))
        assert (await router.of(OTHER_KEY).batches.retrieve(last.id)).status == "in_progress"


async def test_batches_of_a_key_that_is_gone_do_not_run(tmp_path: Path) -> None:
    side, now = FarSide(a=serve), UnixClock()
    held = FarSide(a=Held(0))
    async with serving(config(tmp_path, [KEY, OTHER_KEY]), held, now) as router:
        made = await submit(router.of(KEY), [line("a")])
        await held.until(lambda: bool(held.live))
    async with serving(config(tmp_path, [OTHER_KEY]), side, now) as router:
        mine = await submit(router.of(OTHER_KEY), [line("b")])
        await until(router.of(OTHER_KEY), mine.id, "completed")
        assert said(side.calls) == ["b"]
        now.now_s += DAY_S
    async with serving(config(tmp_path, [KEY, OTHER_KEY]), side, now) as router:
        await until(router.of(KEY), made.id, "expired")


async def test_deleting_the_input_does_not_stop_its_batch(tmp_path: Path) -> None:
    side = FarSide(a=Held(0))
    async with serving(config(tmp_path), side) as router:
        file_id = await upload(router.client, map(line, NAMES))
        made = await router.client.batches.create(
            input_file_id=file_id, endpoint=URL, completion_window="24h"
        )
        await side.until(lambda: bool(side.live))
        await router.client.files.delete(file_id)
    async with serving(config(tmp_path)) as router:
        done = await until(router.client, made.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 6
        await until_true(lambda: names_in(tmp_path / "files") == [done.output_file_id])


async def test_batches_wait_while_there_is_no_room_for_results(tmp_path: Path) -> None:
    lines = [line("a", text="x" * 3_000)]
    async with serving(config(tmp_path, max_bytes_per_key=4_096)) as router:
        made = await submit(router.client, lines)
        done = await until(router.client, made.id, "completed")
        # Input and result together pass the limit.
        with pytest.raises(openai.PermissionDeniedError, match="allowed: 4096") as full:
            await upload(router.client, [line("b", text="x" * 3_000)])
        assert full.value.code == "storage_limit"
        await router.client.files.delete(done.input_file_id)
        await upload(router.client, [line("b")])
        assert done.output_file_id is not None


async def test_the_caps_of_a_key_hold_for_its_batches(tmp_path: Path) -> None:
    side = FarSide(a=Held(1))
    settings = limited(tmp_path, "tenant", max_priority=3, max_in_flight=2)
    lines = [line(name, slo={"priority": 9}) for name in NAMES]
    async with serving(settings, side) as router:
        made = await submit(router.client, lines)
        await side.until(lambda: len(side.calls) == 3)
        second = await submit(router.client, lines)
        await until(router.client, second.id, "in_progress")
        await router.client.batches.cancel(second.id)
        await until(router.client, second.id, "cancelled")
        assert len(side.calls) == 3, "two are under way, of both batches"
        assert {request.slo.priority for _, request in side.calls} == {3}
        await router.client.batches.cancel(made.id)
        done = await until(router.client, made.id, "cancelled")
        (entry,) = await results(router.client, done.output_file_id)
        assert entry["response"]["clamped"] == {"priority": "3"}
    assert {owner for (owner,) in rows(tmp_path, "SELECT owner FROM files")} == {"name-tenant"}


async def test_what_a_client_was_told_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are on the disk once their folder was synced with them in it, bytes once the file was
    with so many of them. Both are before the state, which SQLite syncs, says that a file exists."""
    names: dict[Path, set[str]] = {}
    sizes: dict[int, int] = {}
    fsync = os.fsync

    def seen(handle: int) -> None:
        fsync(handle)
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            path = Path(f"/proc/self/fd/{handle}").readlink()
            names[path] = set(os.listdir(handle))
        else:
            sizes[found.st_ino] = found.st_size

    def safe(path: Path) -> bool:
        named = path.name in names.get(path.parent, ())
        return named and (path.is_dir() or sizes.get(path.stat().st_ino) == path.stat().st_size)

    ready = BatchState._ready

    def made_ready(state: BatchState, file: FileRecord) -> None:
        assert safe(directory / "files" / file.id)
        ready(state, file)

    monkeypatch.setattr("os.fsync", seen)
    monkeypatch.setattr(BatchState, "_ready", made_ready)
    directory = tmp_path / "new" / "store"
    async with serving(config(directory)) as router:
        made = await submit(router.client, map(line, NAMES))
        await until(router.client, made.id, "completed")
    files = names_in(directory / "files")
    assert len(files) == 2
    for path in (directory.parent, directory, directory / "files"):
        assert safe(path), path
    assert all(safe(directory / "files" / name) for name in files)
    assert NAME in names[directory]


async def test_an_input_that_is_not_requests_fails_the_batch(tmp_path: Path) -> None:
    settings = config(tmp_path).model_copy(update={"max_body_bytes": 1_024})
    async with serving(settings) as router:
        lines = [line("a", text="x" * 2_000), line("b"), line("b")]
        made = await submit(router.client, lines)
        failed = await until(router.client, made.id, "failed")
        assert failed.errors is not None and failed.errors.data is not None
        faults = [(fault.code, fault.line) for fault in failed.errors.data]
        assert faults == [("line_too_large", 1), ("duplicate_custom_id", 3)]
        assert failed.failed_at is not None and failed.output_file_id is None
        assert router.edge.side.calls == []


# Keys that have rate limits, and that change or go.


def limited(folder: Path, name: str, **caps: Any) -> RouterConfig:
    """``KEY`` with limits, and the other key without."""
    key = ApiKey(key=SecretStr(KEY), name=name, limits=TenantLimits(**caps))
    return config(folder).model_copy(update={"api_keys": (key, SecretStr(OTHER_KEY))})


async def test_lines_that_wait_for_their_rate_hold_up_no_other_client(tmp_path: Path) -> None:
    side = FarSide(a=serve)
    # Tokens for one line at a time, and a little: the next one waits for twenty seconds.
    settings = limited(tmp_path, "slow", tokens_per_minute=8.7, burst_s=3_600)
    async with serving(settings, side) as router:
        await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) == 1)
        made = await submit(router.of(OTHER_KEY), [line(name) for name in "uvwxyz"])
        await until(router.of(OTHER_KEY), made.id, "completed")
    assert said(side.calls) == ["a", *"uvwxyz"]


async def test_a_running_batch_follows_the_caps_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.01)
    folder, path = tmp_path / "batches", tmp_path / "keys.yaml"
    monkeypatch.setattr("sluice.router.batches.lines.LONGEST_PAUSE_S", 0.01)
    path.write_text(f"- {{key: {KEY}, name: acme, limits: {{tokens_per_minute: 0.001}}}}\n")
    side = FarSide(a=serve)
    settings = config(folder).model_copy(update={"api_keys_file": path})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.calls) == 1)
        path.write_text(f"- {{key: {KEY}, name: acme, limits: {{max_output_tokens: 7}}}}\n")
        done = await until(router.client, made.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 6
    held = [request.body.get("max_completion_tokens") for _, request in side.calls]
    assert held == [None, *[7] * 5]


async def test_the_batches_of_a_key_that_is_taken_away_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.tenancy.auth.POLL_S", 0.01)
    folder, path = tmp_path / "batches", tmp_path / "keys.yaml"
    path.write_text(f"- {{key: {KEY}, name: acme}}\n- other-key\n")
    side = FarSide(a=Held(1))
    settings = config(folder).model_copy(update={"api_keys_file": path})
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        await side.until(lambda: len(side.live) == 5)
        path.write_text("- other-key\n")
        await side.until(lambda: not side.live)
        # With the client's new key it goes on.
        path.write_text("- {key: new-key, name: acme}\n")
        side.behaviours["a"] = serve
        await accepted(router.of("new-key"))
        done = await until(router.of("new-key"), made.id, "completed")
        assert done.request_counts is not None and done.request_counts.completed == 6


async def accepted(client: openai.AsyncOpenAI) -> None:
    """Wait until the client's key opens the API."""
    async with asyncio.timeout(120):
        while True:
            try:
                await client.models.list()
                return
            except openai.AuthenticationError:
                await asyncio.sleep(0.01)


async def test_the_rate_of_a_key_holds_for_its_batches(tmp_path: Path) -> None:
    side = FarSide(a=serve)
    settings = limited(tmp_path, "tenant", requests_per_minute=5 / 60, burst_s=3_600)
    async with serving(settings, side) as router:
        made = await submit(router.client, [line(name) for name in "abcdef"])
        # The upload and the batch itself are requests, too.
        await side.until(lambda: len(side.calls) == 3)
        with pytest.raises(openai.RateLimitError):
            await upload(router.client, [line("g")])
        with pytest.raises(openai.RateLimitError):
            await router.client.batches.create(
                input_file_id="file-x", endpoint=URL, completion_window="24h"
            )
        await router.client.batches.cancel(made.id)
        done = await until(router.client, made.id, "cancelled")
        assert done.request_counts is not None and done.request_counts.completed == 3
    assert len(side.calls) == 3


IDLE = tuple(SPANS_S)
HOUR = (0.0, *([3_600.0] * (len(SPANS_S) - 1)))
NOTHING = (0.0,) * len(SPANS_S)


def strict(directory: Path, **batches: Any) -> RouterConfig:
    """A configuration that refuses windows that it cannot promise."""
    settings = config(directory, completion_windows=("30m", "2h", "24h"), **batches)
    only = {**settings.classes, "batch": ServiceClass(when_unattainable="reject")}
    return settings.model_copy(update={"classes": only})


def windows(router: Served) -> dict[str, float | None]:
    """The counts of completion windows by outcome."""
    outcomes = ("promised", "refused", "kept", "missed")
    name = "sluice_batches_promised_total"
    return {each: router.edge.sample(name, outcome=each) for each in outcomes}


def promise_of(batch: Any) -> Any:
    return batch.to_dict()["promise"]


async def test_a_window_is_promised_and_kept(tmp_path: Path) -> None:
    async with serving(strict(tmp_path)) as router:
        router.edge.controller.left = Leftover(10.0, IDLE)
        made = await router.client.batches.create(
            input_file_id=await upload(router.client, map(line, "abc")),
            endpoint="/v1/chat/completions",
            completion_window="30m",  # type: ignore[arg-type]
        )
        assert made.expires_at == made.created_at + 1_800
        done = await until(router.client, made.id, "completed", "failed")
        assert (done.status, promise_of(done)) == ("completed", "kept")
        await until_true(lambda: windows(router)["kept"] == 1)
        counts = windows(router)
        assert counts["promised"] == 1
        assert not counts["refused"] and not counts["missed"]
        assert all(request.best_effort for _, request in router.edge.side.calls)


async def test_one_that_cannot_be_promised_is_refused_with_the_nearest(tmp_path: Path) -> None:
    async with serving(strict(tmp_path)) as router:
        router.edge.controller.left = Leftover(100_000.0, IDLE)
        done = await until(router.client, (await submit(router.client, [line("a")])).id, "failed")
        assert done.errors is not None and done.errors.data is not None
        (fault,) = done.errors.data
        assert (fault.code, fault.param) == ("window_unattainable", "completion_window")
        assert "the nearest that could be promised now is 1667m" in (fault.message or "")
        assert (router.edge.side.calls, promise_of(done)) == ([], None)
        await until_true(lambda: windows(router)["refused"] == 1)


async def test_without_a_class_that_refuses_it_runs_as_before(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as router:
        router.edge.controller.left = Leftover(100_000.0, IDLE)
        made = await submit(router.client, [line("a")])
        done = await until(router.client, made.id, "completed", "failed")
        assert (done.status, promise_of(done)) == ("completed", None)


async def test_lines_that_no_model_can_run_take_nothing(tmp_path: Path) -> None:
    wrong = [{"max_tokens": each} for each in (-5, "x", 1e300, [1], None, True)]
    wrong += [{"messages": 5}, {"model": "unknown"}, {"model": 7}, {"n": -1}, {"tools": {}}]
    async with serving(strict(tmp_path)) as router:
        router.edge.controller.left = Leftover(10.0, IDLE)
        lines = [line(f"{number}", **body) for number, body in enumerate(wrong)]
        done = await until(router.client, (await submit(router.client, lines)).id, "completed")
        assert promise_of(done) == "kept"


async def test_what_was_promised_counts_also_after_a_restart(tmp_path: Path) -> None:
    held = FarSide(a=Held(0))
    async with serving(strict(tmp_path), held) as router:
        router.edge.controller.left = Leftover(2_000.0, HOUR)
        first = await submit(router.client, [line("first")])
        await until(router.client, first.id, "in_progress")
        assert promise_of(await router.client.batches.retrieve(first.id)) == "promised"
    async with serving(strict(tmp_path), held) as router:
        router.edge.controller.left = Leftover(2_000.0, HOUR)
        # Two of them need more than the hour that is left; each alone does not.
        second = await submit(router.client, [line("second")])
        assert (await until(router.client, second.id, "failed", "completed")).status == "failed"
        assert promise_of(await router.client.batches.retrieve(first.id)) == "promised"


async def test_the_lines_of_a_batch_that_is_behind_ask_for_a_promise(tmp_path: Path) -> None:
    side, now = FarSide(a=Held(1)), UnixClock()
    async with serving(strict(tmp_path, max_lines_in_flight=1), side, now) as router:
        controller = router.edge.controller
        controller.left = Leftover(10.0, IDLE)
        made = await submit(router.client, map(line, "abcd"))
        await until_true(lambda: len(side.calls) == 2)
        controller.left = Leftover(10.0, NOTHING)
        while promise_of(await router.client.batches.retrieve(made.id)) != "behind":
            pass
        assert router.edge.sample("sluice_batches_behind") == 1
        assert {query.tiers for query in controller.queries} == {frozenset({Tier.BEST_EFFORT})}
    # Its next router goes on so; what cannot be promised is served as best effort at once.
    side = FarSide(a=Held(9))
    async with serving(strict(tmp_path, max_lines_in_flight=1), side, now) as router:
        controller = router.edge.controller
        controller.left = Leftover(10.0, NOTHING)
        refusal = RouteDecision(None, UNATTAINABLE, retry_after_s=1.0)
        controller.decisions = [refusal, *["a"] * 9]
        done = await until(router.client, made.id, "completed")
        assert promise_of(done) == "kept"
        await until_true(lambda: router.edge.sample("sluice_batches_behind") == 0)
        first, second, third, *_ = controller.queries
        assert first.tiers == third.tiers == frozenset({Tier.GUARANTEED})
        assert second.tiers == frozenset({Tier.BEST_EFFORT})
        # A third of the window for each of three lines, but no more than an hour.
        assert first.slo.e2e_s == 3_600.0
        assert not side.calls[-1][1].best_effort


async def test_a_window_that_passes_is_missed(tmp_path: Path) -> None:
    now = UnixClock()
    async with serving(strict(tmp_path), FarSide(a=Held(1)), now) as router:
        router.edge.controller.left = Leftover(10.0, IDLE)
        made = await submit(router.client, map(line, "ab"))
        await until_true(lambda: sorted(said(router.edge.side.calls)) == ["a", "b"])
        now.now_s += 24 * 3_600
        done = await until(router.client, made.id, "expired")
        assert promise_of(done) == "missed"
        await until_true(lambda: windows(router)["missed"] == 1)


async def test_places_go_to_the_earliest_deadline() -> None:
    places = LinePlaces(1)
    give_back = await places.take(lambda: ANYONE)
    order: list[str] = []

    async def wait(name: str, *due_s: float) -> None:
        release = await places.take(lambda: ANYONE, *due_s)
        order.append(name)
        release()

    async with asyncio.TaskGroup() as group:
        for name, *due_s in (
            ("any",),
            ("later", 9.0),
            ("first", 3.0),
            ("any too",),
            ("last", 99.0),
        ):
            group.create_task(wait(name, *due_s))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        give_back()
    assert order == ["first", "later", "last", "any", "any too"]


async def test_a_cancelled_batch_gives_its_time_back_and_has_no_promise(tmp_path: Path) -> None:
    async with serving(strict(tmp_path), FarSide(a=Held(0))) as router:
        router.edge.controller.left = Leftover(2_000.0, HOUR)
        first = await submit(router.client, [line("first")])
        await until(router.client, first.id, "in_progress")
        await router.client.batches.cancel(first.id)
        done = await until(router.client, first.id, "cancelled", "expired")
        assert (done.status, promise_of(done)) == ("cancelled", None)
        # Both together need more than the hour that is left.
        second = await submit(router.client, [line("second")])
        begun = await until(router.client, second.id, "in_progress", "failed")
        assert promise_of(begun) == "promised"
        assert not windows(router)["kept"] and not windows(router)["missed"]


def test_the_models_that_a_batch_names_are_bounded() -> None:
    def checked(names: list[str]) -> Checked:
        lines = [line(f"{place}", model=name) for place, name in enumerate(names)]
        file = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
        return check_lines(file, "/v1/chat/completions", 1 << 20)

    most = [f"model-{number}" for number in range(MAX_MODELS)]
    assert list(checked([*most, *most]).lines) == most
    (fault,) = checked([*most, "one-more"]).faults
    assert (fault.code, fault.line, fault.param) == ("too_many_models", MAX_MODELS + 1, "model")
    assert not checked(["m" * 513]).lines, "it is refused when it is run"
