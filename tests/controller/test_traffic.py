"""What the controller records for the shadow policies."""

from __future__ import annotations

import pickle

import pytest

from sluice.controller.config import ControllerConfig, ShadowConfig
from sluice.controller.observability import traffic
from sluice.protocol.messages import RequestEnding
from tests.controller.fleet import Clock, ObservedController, hello, query

SHADOWED = ControllerConfig(shadow=ShadowConfig(admission="none"))


def ending(request_id: str) -> RequestEnding:
    return RequestEnding(request_id, "ok", (), 7, 0.1, 0.01, 0.2, kept=True)


async def test_it_is_read_once_and_holds_no_text_of_the_client() -> None:
    clock = Clock()
    controller = ObservedController(SHADOWED, clock)
    await controller.hello(hello("a"))
    asked = query(1)._replace(
        request_id="r1", client_request_id="secret", waited_s=2.0, prefix=(5, 6), tenant=3
    )
    await controller.route([asked])
    await controller.sync([ending("r1")])
    found = await controller.traffic(with_replicas=True)
    assert found is not None
    assert found.queries == [(clock(), asked._replace(client_request_id=""))]
    assert [each.request_id for each in found.endings] == ["r1"]
    registered, summary = found.replicas["a"]
    assert (registered.max_sequences, summary["total_kv_blocks"]) == (256, 1_000)
    assert (found.more, found.lost) == (False, False)
    assert b"secret" not in pickle.dumps(found)
    again = await controller.traffic()
    assert again is not None and not again.queries and not again.endings and not again.replicas
    assert again.members == found.members
    await controller.hello(hello("b"))
    later = await controller.traffic()
    assert later is not None and later.members != found.members


async def test_it_is_bounded_and_what_is_lost_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_KEPT", 5)
    monkeypatch.setattr(traffic, "MAX_READ", 2)
    controller = ObservedController(SHADOWED, Clock())
    await controller.hello(hello("a"))
    for key in range(1, 8):
        await controller.route([query(key)._replace(request_id=f"r{key}")])
    read = [await controller.traffic() for _ in range(3)]
    assert [[query.request_id for _, query in part.queries] for part in read if part] == [
        ["r3", "r4"],
        ["r5", "r6"],
        ["r7"],
    ]
    assert [(part.more, part.lost) for part in read if part] == [
        (True, True),
        (True, False),
        (False, False),
    ]


async def test_without_shadow_policies_nothing_is_recorded() -> None:
    controller = ObservedController(ControllerConfig(), Clock())
    await controller.hello(hello("a"))
    await controller.route([query(1)])
    assert await controller.traffic() is None
    assert (await controller.snapshot())["shadow"] is None


async def test_operators_see_what_was_pushed() -> None:
    controller = ObservedController(SHADOWED, Clock())
    found = (await controller.snapshot())["shadow"]
    assert found == {"policies": {"admission": "none"}, "windows": 0, "figures": {}}
