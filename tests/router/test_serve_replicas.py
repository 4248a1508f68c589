"""Which pool of a role gets a call, from the replicas that Serve's request router knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray.serve._private.common import DeploymentID

from sluice.router.serve.replicas import ServeReplicas
from sluice.router.serve.running import RUNNING, Running
from sluice.router.wire import TARGET_KWARG
from tests.controller.fleet import Clock


class Handle:
    """A deployment that answers nothing."""

    def __init__(self, name: str) -> None:
        self.deployment_id = DeploymentID(name, "pools-of-a-role")

    def options(self, **_: Any) -> Handle:
        return self

    def runs(self, *names: str) -> Handle:
        RUNNING.note(self.deployment_id, names)
        return self


async def test_a_target_is_called_in_its_pool_and_others_by_the_number_of_replicas() -> None:
    large, small, prefill = Handle("large"), Handle("small"), Handle("prefill")
    closed: list[str] = []
    replicas = ServeReplicas(
        {"mixed": [large, small], "prefill": [prefill]},  # type: ignore[list-item]
        lambda: closed,
    )
    assert not replicas.single and replicas.roles == ("mixed", "prefill")

    def chosen(target: str | None = None, *avoid: str) -> Counter[str]:
        pools = (replicas._pool("mixed", target, avoid) for _ in range(400))
        return Counter(pool.deployment.name for pool in pools)

    assert set(chosen()) == {"large"}, "nothing is known yet"
    large.runs("a", "b", "c")
    small.runs("d")
    assert (chosen("c"), chosen("d")) == ({"large": 400}, {"small": 400})
    found = chosen()
    assert found["large"] > found["small"] > 0
    assert set(chosen(None, "d")) == {"large"}
    closed[:] = ["a", "b", "c"]
    assert set(chosen()) == {"small"}
    # One that has failed the request is better than one that may get none.
    assert set(chosen(None, "d")) == {"small"}
    small.runs()
    closed.clear()
    assert set(chosen("d")) == {"large"}
    assert replicas._pool("prefill", None).deployment == prefill.deployment_id


def test_the_start_of_the_first_replica_is_predicted() -> None:
    """By the configured time at first, then by what the last start took; of the first of several
    pools."""
    clock = Clock()
    running, pools = Running(clock), [Handle("large").deployment_id, Handle("small").deployment_id]
    assert running.starts_in_s(pools, 60.0) == 60.0
    clock.advance(50.0)
    assert running.starts_in_s(pools, 60.0) == 10.0
    clock.advance(50.0)
    assert running.starts_in_s(pools, 60.0) == 6.0, "it takes longer"
    running.note(pools[0], ["a"])
    assert running.starts_in_s(pools, 60.0) is None
    running.note(pools[0], [])
    running.note(pools[0], [])
    clock.advance(30.0)
    assert running.starts_in_s(pools[:1], 60.0) == 70.0
    running.note(pools[0], ["b", "c"])
    running.note(pools[0], ["c"])
    running.note(pools[0], [])
    clock.advance(5.0)
    assert running.starts_in_s(pools[:1], 60.0) == 25.0
    assert running.starts_in_s(pools, 60.0) == 6.0


async def test_of_a_model_without_replicas_the_whole_start_is_predicted() -> None:
    pools: Any = {"mixed": [handle := Handle("idle")]}
    sleeper = ServeReplicas(pools, scales_to_zero=True, startup_s=90.0)
    assert sleeper.starts_in_s == 90.0
    handle.runs("a")
    assert sleeper.starts_in_s is None


class Addressed(Handle):
    """A deployment whose replicas say where they send streams, each once."""

    def __init__(self, name: str, **addresses: str) -> None:
        super().__init__(name)
        self.addresses = addresses
        self.asked: list[str] = []
        self.runs(*addresses)

    def remote(self, **hint: str) -> asyncio.Task[tuple[str, str]]:
        return asyncio.create_task(self._answer(hint[TARGET_KWARG]))

    async def _answer(self, name: str) -> tuple[str, str]:
        self.asked.append(name)
        if not self.addresses[name]:
            await asyncio.Event().wait()
        return name, self.addresses[name]


async def test_replicas_are_found_by_their_address_and_asked_for_it_once() -> None:
    mixed = Addressed("mixed", a="10.0.0.1:71", b="10.0.0.2:72")
    decode = Addressed("decode", c="10.0.0.2:73", hung="")
    replicas = ServeReplicas({"mixed": [mixed], "decode": [decode]})  # type: ignore[list-item]
    assert await replicas.at({"10.0.0.1:71", "10.9.9.9:1"}) == {"a": "mixed"}
    # By now all that answer have answered.
    assert await replicas.at({"10.0.0.2"}) == {"b": "mixed", "c": "decode"}
    assert await replicas.at({"10.0.0.2:73"}) == {"c": "decode"}
    assert await replicas.at({"10.0.0.2:7"}) == {}
    assert (sorted(mixed.asked), decode.asked.count("c")) == (["a", "b"], 1)
    mixed.runs("b")
    assert await replicas.at({"10.0.0.1:71"}) == {}


async def test_a_model_is_asleep_while_it_may_have_no_replica_and_has_none() -> None:
    handle = Handle("sleeper")
    usual = ServeReplicas({"mixed": [handle]})  # type: ignore[list-item]
    sleeper = ServeReplicas({"mixed": [handle]}, scales_to_zero=True)  # type: ignore[list-item]
    assert sleeper.single and (sleeper.asleep, usual.asleep) == (True, False)
    handle.runs("a")
    assert not sleeper.asleep
    handle.runs()
    assert sleeper.asleep
