"""Pages of other sites, and what they may ask."""

from __future__ import annotations

import httpx
import pytest

from sluice.router.config import RouterConfig
from tests.router.far_side import CHAT_BODY, Edge, FarSide, serve
from tests.router.test_admin import ADMIN, KEYS, USER, operated

APP = "https://app.example"


def edge(*origins: str) -> Edge:
    config = RouterConfig.model_validate({**KEYS, "cors_origins": origins})
    return Edge(FarSide(a=serve), config=config)


async def preflight(client: httpx.AsyncClient, path: str, origin: str) -> httpx.Response:
    wanted = {"access-control-request-method": "POST"}
    wanted["access-control-request-headers"] = "authorization,content-type,x-slo-class"
    return await client.options(path, headers={"origin": origin, **wanted})


async def test_pages_of_the_origins_in_the_configuration_may_ask() -> None:
    async with edge(APP).client() as client:
        told = await preflight(client, "/v1/chat/completions", APP)
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == APP
        assert "x-slo-class" in told.headers["access-control-allow-headers"]
        headers = {"origin": APP, "authorization": f"Bearer {USER}"}
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == APP
        assert "x-sluice-class" in answer.headers["access-control-expose-headers"]
        refused = await client.post("/v1/chat/completions", json=CHAT_BODY, headers={"origin": APP})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == APP
        for each in (told, answer, refused):
            assert "access-control-allow-credentials" not in each.headers


@pytest.mark.parametrize("origins", [(), (APP,)])
@pytest.mark.parametrize(
    "origin", ["https://other.example", "http://app.example", "https://app.example:444", "null"]
)
async def test_pages_of_other_origins_may_not(origins: tuple[str, ...], origin: str) -> None:
    async with edge(*origins).client() as client:
        told = await preflight(client, "/v1/chat/completions", origin)
        assert told.status_code >= 400
        headers = {"origin": origin, "authorization": f"Bearer {USER}"}
        answer = await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)
        for each in (told, answer):
            assert "access-control-allow-origin" not in each.headers


async def test_by_default_there_is_no_answer_to_a_browsers_question() -> None:
    async with edge().client() as client:
        assert (await preflight(client, "/v1/models", APP)).status_code == 401
        headers = {"authorization": f"Bearer {USER}"}
        assert (await client.options("/v1/models", headers=headers)).status_code == 405


async def test_what_is_for_operators_is_for_no_other_page() -> None:
    system = await operated({**KEYS, "cors_origins": ["*"]})
    async with system.edge.client() as client:
        assert (await preflight(client, "/v1/models", APP)).headers[
            "access-control-allow-origin"
        ] == "*"
        for path in ("/admin/v1/fleet", "/admin/v1/replicas/a/drain", "/ui", "/metrics"):
            headers = {"origin": APP, "authorization": f"Bearer {ADMIN}"}
            for told in (
                await preflight(client, path, APP),
                await client.get(path, headers=headers),
            ):
                assert not [name for name in told.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["", "app.example", "https://app.example/", "https://*.example", "null", "https://a b"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        RouterConfig.model_validate({"cors_origins": [origin]})
