"""Messages above gRPC's limit: the request is at fault, and its replica is not."""

from __future__ import annotations

import grpc  # type: ignore[import-untyped]
import pytest

from sluice.deploy import ray_start
from sluice.router.errors import Reason
from sluice.router.serve.replicas import failure_of
from tests.router.far_side import CHAT_BODY, Edge, FarController, FarSide, fail, serve

_LIMIT = 64 << 10


async def refusal(size: int) -> grpc.aio.AioRpcError:
    """How gRPC itself refuses an answer of ``size`` bytes where :data:`_LIMIT` are allowed."""

    async def answer(_: bytes, __: object) -> bytes:
        return b"x" * size

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limit = [("grpc.max_receive_message_length", _LIMIT)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", limit) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/m")(b"")
    finally:
        await server.stop(None)
    error: grpc.aio.AioRpcError = caught.value
    return error


async def test_a_message_that_is_too_large_is_the_requests_fault() -> None:
    failure = failure_of(await refusal(_LIMIT + 1))
    assert failure.reason is Reason.TOO_LARGE
    side = FarSide(a=fail(failure), b=serve)
    controller = FarController("a")
    edge = Edge(side, controller)
    async with edge.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY)
    assert answer.status_code == 413
    assert "maximum message size" in answer.json()["error"]["message"]
    assert [name for name, _ in side.calls] == ["a"], "computed once"
    assert controller.troubles == []
    assert controller.gone == []
    assert edge.sample("sluice_retries_total") == 0


def test_a_cluster_takes_larger_messages_than_any_body() -> None:
    limit = int(ray_start.TUNED["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert limit > 1 << 30, "router.max_body_bytes may be 1 GiB"
    assert limit < 1 << 31, "gRPC takes a signed 32-bit number"
