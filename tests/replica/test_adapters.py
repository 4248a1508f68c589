"""Adapters of a directory: what is loaded, what leaves, and what is refused. The engine's client is
a list of what it was asked; tests/e2e/test_clients.py has a real one."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from sluice.protocol.errors import RequestError
from sluice.replica.config import EngineConfig

pytestmark = pytest.mark.vllm

LORA = {"enable-lora": True, "max-loras": 3, "lora-modules": ["fixed=/x"]}


class Side:
    """An engine and a directory, followed by hand; ``calls`` of the engine's client."""

    def __init__(self, directory: Path) -> None:
        from sluice.replica.vllm.adapters import directory_adapters

        numbers = itertools.count(1)
        self.directory = directory
        self.asked: list[tuple[str, Any]] = []
        self.broken: set[str] = set()
        counter = SimpleNamespace(inc=lambda step: next(numbers))
        self.models = SimpleNamespace(lora_requests={}, lora_id_counter=counter)
        self.calls: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_loras=3))
        config = EngineConfig(served_model_name="base", adapters_dir=directory, vllm_args=LORA)
        self.adapters = directory_adapters(config, self, self.models)

    async def add_lora(self, request: Any) -> None:
        if request.lora_name in self.broken:
            raise ValueError("no such rank")
        self.asked.append(("add", request.lora_name))

    async def remove_lora(self, number: int) -> None:
        self.asked.append(("remove", number))

    async def listed(self) -> list[str]:
        """What is served after another look at the directory."""
        await self.adapters.update()
        return list(self.models.lora_requests)

    def put(self, name: str, weights: str = "weights") -> None:
        """As a careful operator does: it is complete when it appears."""
        made = self.directory / f".{name}"
        made.mkdir()
        (made / "adapter_config.json").write_text("{}")
        (made / "adapter_model.safetensors").write_text(weights)
        for path in made.iterdir():
            os.utime(path, (1_000, 1_000))
        made.rename(self.directory / name)

    def take(self, name: str) -> None:
        shutil.rmtree(self.directory / name)


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


async def test_a_folder_that_appears_is_loaded_and_one_that_disappears_leaves(side: Side) -> None:
    (side.directory / "half").mkdir()
    (side.directory / "a file").write_text("")
    side.put("one")
    for taken in ("base", "fixed"):  # by the model, and by a configured adapter
        side.put(taken)
    assert (await side.listed(), side.asked) == (["one"], [("add", "one")])
    side.put("two")
    assert await side.listed() == ["one", "two"]
    side.take("one")
    assert (await side.listed(), side.asked[2:]) == (["two"], [("remove", 1)])


async def test_an_adapter_stays_in_the_engine_until_its_last_request_has_ended(
    side: Side,
) -> None:
    side.put("one")
    await side.adapters.update()
    number = await side.adapters.ensure("one")
    side.calls["r"] = SimpleNamespace(adapter=number)
    side.take("one")
    # New requests are vLLM's to refuse: it does not list the adapter any more.
    assert await side.listed() == [] and await side.adapters.ensure("one") == 0
    assert side.asked == [("add", "one")]
    # It comes back meanwhile, as another one to the engine.
    side.put("one")
    assert await side.adapters.ensure("one") == 2 != number
    del side.calls["r"]
    await side.adapters.update()
    assert side.asked == [("add", "one"), ("add", "one"), ("remove", 1)]


async def test_a_request_may_be_ahead_of_the_next_look(side: Side) -> None:
    side.put("one")
    assert await side.adapters.ensure("one") == 1
    for other in ("base", "fixed", "unknown", "../one", "", None, 7, "a/b"):
        assert await side.adapters.ensure(other) == 0
    assert side.asked == [("add", "one")]


async def test_no_more_are_loaded_than_may_be_in_one_batch(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three, one is configured."""
    for name in ("a", "b", "c"):
        side.put(name)
    for _ in range(3):
        assert await side.listed() == ["a", "b"]
    with pytest.raises(RequestError, match="as many as max-loras allows") as caught:
        await side.adapters.ensure("c")
    assert caught.value.status == 503  # another replica may have it
    side.take("a")
    assert await side.listed() == ["b", "c"]


async def test_what_cannot_be_loaded_is_tried_again_when_it_has_changed(side: Side) -> None:
    side.broken.add("bad")
    side.put("bad")
    side.put("good")
    assert await side.listed() == ["good"]
    with pytest.raises(RequestError, match="no such rank"):
        await side.adapters.ensure("bad")
    side.broken.clear()
    assert await side.listed() == ["good"], "the same files"
    side.take("bad")
    side.put("bad", "other weights")
    assert await side.listed() == ["good", "bad"]


async def test_a_name_is_not_used_for_other_weights(side: Side) -> None:
    """The engine keeps KV of prompts by the name."""
    side.put("one")
    await side.adapters.update()
    side.take("one")
    await side.adapters.update()
    side.put("one", "others weights")
    assert await side.listed() == []
    with pytest.raises(RequestError, match="use a new name"):
        await side.adapters.ensure("one")
    side.take("one")
    side.put("one")
    assert await side.listed() == ["one"]


async def test_replaced_files_are_unloaded_and_the_same_files_again_are_not(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Also within one look, with the size and the time of the earlier files."""
    for name in ("one", "two"):
        side.put(name)
    await side.adapters.update()
    digests = side.adapters.digests
    assert digests["one"] == digests["two"]
    for name, weights in (("one", "weighty"), ("two", "weights")):
        side.take(name)
        side.put(name, weights)
    with caplog.at_level("WARNING"):
        assert (await side.listed(), side.asked[2:]) == (["two"], [("remove", 1)])
    assert [each.message for each in caplog.records] == [
        "the files of the adapter one were replaced; unloading it",
        "the adapter one is not loaded: other files were loaded under this name before; use a new "
        "name",
    ]
    with pytest.raises(RequestError, match="use a new name"):
        await side.adapters.ensure("one")
    # Another replica can see that this one has had other files.
    assert side.adapters.digests == digests
    side.take("one")
    await side.adapters.update()
    assert side.adapters.digests == {"two": digests["two"]}


async def test_files_that_change_while_they_are_loaded_are_not_served(side: Side) -> None:
    side.put("one")
    add = side.add_lora

    async def slow(request: Any) -> None:
        side.take("one")
        side.put("one", "others!")
        await add(request)

    side.add_lora = slow  # type: ignore[method-assign]
    assert (await side.listed(), side.adapters.digests) == ([], {})
    side.add_lora = add  # type: ignore[method-assign]
    assert await side.listed() == ["one"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_args": {}}, "needs vLLM with enable-lora"),
        ({"kind": "simulated"}, "needs vLLM with enable-lora"),
        ({"adapters_dir": "adapters"}, "absolute path"),
        ({"preemption": True}, "needs preemption: false"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    given = {"adapters_dir": "/adapters", "vllm_args": {"enable-lora": True}, **fields}
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(given)
