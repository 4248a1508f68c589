"""Completion windows as objectives: promised, refused, kept, and lines that hurry."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

from sluice.router.batches.lines import MAX_MODELS, Checked, check_lines
from sluice.router.batches.run import LinePlaces
from sluice.router.config import RouterConfig, ServiceClass
from sluice.router.tenancy.limits import ANYONE
from sluice.scheduling.placement.windows import SPANS_S, Leftover
from sluice.scheduling.request.job import UNATTAINABLE, RouteDecision, Tier
from tests.router.batches.routers import (
    Held,
    Served,
    UnixClock,
    config,
    line,
    said,
    serving,
    submit,
    until,
    until_true,
    upload,
)
from tests.router.far_side import FarSide

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
