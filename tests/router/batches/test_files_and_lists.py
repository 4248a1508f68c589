"""Files, lists and limits over HTTP, with the official client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from sluice.router.config import DAY_S, BatchesConfig, RouterConfig
from tests.documents import ROOT, marked, rows, section
from tests.router.batches.routers import (
    KEY,
    OTHER_KEY,
    URL,
    Held,
    UnixClock,
    config,
    jsonl,
    line,
    names_in,
    serving,
    submit,
    until,
    upload,
)
from tests.router.far_side import Edge, FarSide, serve

FOREVER = "file-" + "0" * 32
JSON = {"content-type": "application/json"}
BOUNDARY = {"content-type": "multipart/form-data; boundary=edge"}


def form(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> bytes:
    """A form with these parts: what follows ``form-data`` in their headers, and their content."""
    heads = [
        f"--edge\r\ncontent-disposition: form-data{head}\r\n\r\n".encode() for head, _ in parts
    ]
    return (
        b"".join(head + data + b"\r\n" for head, (_, data) in zip(heads, parts, strict=True)) + end
    )


def everything_in(folder: Path) -> list[bytes]:
    """All paths and contents."""
    paths = list(folder.rglob("*"))
    return [str(path).encode() for path in paths] + [
        path.read_bytes() for path in paths if path.is_file()
    ]


FILE = ('; name="file"; filename="x"', b"{}\n")
PURPOSE = ('; name="purpose"', b"batch")


async def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    now = UnixClock()
    content = jsonl([line("a")]) + bytes(range(256)) * 9_000 + b"\r\n--almost a boundary"
    async with serving(config(tmp_path), now=now) as router:
        files = router.client.files
        made = await files.create(file=("in put.jsonl", content), purpose="batch")
        assert (made.object, made.bytes, made.filename) == ("file", len(content), "in put.jsonl")
        assert (made.purpose, made.status) == ("batch", "processed")
        assert made.created_at == now.now_s and made.expires_at == now.now_s + 30 * DAY_S
        assert await files.retrieve(made.id) == made
        assert (await files.content(made.id)).content == content
        assert (await files.delete(made.id)).deleted
        for call in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await call(made.id)
        assert not list((tmp_path / "files").iterdir())


async def test_a_file_expires_when_its_maker_said(tmp_path: Path) -> None:
    now = UnixClock()
    async with serving(config(tmp_path), now=now) as router:
        files = router.client.files
        expires_after: Any = {"anchor": "created_at", "seconds": 3_600}
        made = await files.create(file=b"x", purpose="batch", expires_after=expires_after)
        assert made.expires_at == now.now_s + 3_600
        now.now_s += 3_600
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(made.id)
        assert [file async for file in files.list()] == []
    async with serving(config(tmp_path), now=now) as router:
        # What has expired is deleted at the first look.
        async with asyncio.timeout(120):
            while list((tmp_path / "files").iterdir()):
                await router.client.models.list()


async def test_lists_go_on_after_what_was_seen(tmp_path: Path) -> None:
    now = UnixClock()
    async with serving(config(tmp_path), now=now) as router:
        client = router.client
        made = []
        for _ in range(5):
            now.now_s += 1
            made.append((await submit(client, [line("a")])).id)
        for batch_id in made:
            await until(client, batch_id, "completed")
        first = await client.batches.list(limit=2)
        assert [batch.id for batch in first.data] == made[:2:-1]
        assert first.has_more
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
        inputs = [file.id async for file in client.files.list(purpose="batch", limit=2)]
        assert len(inputs) == 5
        oldest = [file.id async for file in client.files.list(purpose="batch", order="asc")]
        assert oldest == inputs[::-1]
        everything = [file.purpose async for file in client.files.list()]
        assert sorted(everything) == ["batch"] * 5 + ["batch_output"] * 5
        with pytest.raises(openai.NotFoundError):
            await client.batches.list(after=FOREVER)
        for wrong in (0, 101, -1, "many", 10**12):
            with pytest.raises(
                openai.BadRequestError, match="limit must be an integer from 1 to 100"
            ):
                await client.batches.list(limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="order must be asc or desc"):
            await client.files.list(order="up")  # type: ignore[arg-type]


async def test_nobody_sees_what_belongs_to_another_key(tmp_path: Path) -> None:
    async with serving(config(tmp_path, [KEY, OTHER_KEY])) as router:
        mine, other = router.of(KEY), router.of(OTHER_KEY)
        made = await submit(mine, [line("a")])
        done = await until(mine, made.id, "completed")
        assert done.output_file_id is not None
        for file_id in (done.input_file_id, done.output_file_id):
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(file_id)
        for look in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await look(made.id)
        with pytest.raises(openai.NotFoundError) as refused:
            await other.batches.create(
                input_file_id=done.input_file_id,
                endpoint=URL,
                completion_window="24h",
            )
        assert refused.value.param == "input_file_id"
        assert [entry async for entry in other.files.list()] == []
        assert [entry async for entry in other.batches.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await router.of("wrong").files.list()
        assert len([entry async for entry in mine.files.list()]) == 2
    assert not [each for each in everything_in(tmp_path) if KEY.encode() in each]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../../etc/passwd",
        "%2e%2e%2f%2e%2e%2fsecret",
        "..%2Fsecret.txt",
        "file-../../secret.txt",
        FOREVER + "/../secret.txt",
        FOREVER.upper(),
        FOREVER + "\n",
        "anyone",
        "\x00",
    ],
)
async def test_no_id_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.txt").write_text("what is outside")
    edge = Edge(FarSide(a=serve), config=config(tmp_path / "store"))
    quoted = "".join(
        each if each in "/%." or each.isalnum() else f"%{ord(each):02x}" for each in name
    )
    async with edge.client() as client:
        for path in (f"/v1/files/{quoted}", f"/v1/files/{quoted}/content", f"/v1/batches/{quoted}"):
            response = await client.get(httpx.URL(f"http://localhost{path}"))
            assert response.status_code in (404, 405), response.text
            assert "what is outside" not in response.text
        body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        response = await client.post("/v1/batches", json=body)
        assert response.status_code == 404


async def test_a_filename_is_only_a_name(tmp_path: Path) -> None:
    edge = Edge(FarSide(a=serve), config=config(tmp_path / "store"))
    async with edge.client() as client:
        for name in ("../../evil", "/etc/passwd", "a" * 900, "tab\there"):
            body = form((f'; name="file"; filename="{name}"', b"{}\n"), PURPOSE)
            made = (await client.post("/v1/files", content=body, headers=BOUNDARY)).json()
            assert made["filename"] == name[:255].replace("\t", "_")
    assert names_in(tmp_path) == ["store"]
    kept = names_in(tmp_path / "store/files")
    assert all(name.startswith("file-") for name in kept) and len(kept) == 4


BAD_FORMS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends before its last boundary"),
    "no form": (b"{}", "not a form"),
    "cut off": (form(FILE, PURPOSE, end=b""), "ends before its last boundary"),
    "no file": (form(PURPOSE), "must have a file"),
    "no purpose": (form(FILE), "purpose must be batch, got None"),
    "two files": (form(FILE, FILE, PURPOSE), "must have one file"),
    "purpose twice": (form(FILE, PURPOSE, PURPOSE), "must be given once"),
    "no name": (form(("", b"x"), FILE), "must have a name"),
    "other purpose": (form(FILE, ('; name="purpose"', b"vision")), "purpose must be batch"),
    "unknown field": (form(FILE, PURPOSE, ('; name="path"', b"/")), "'path' is not a known field"),
    "not text": (form(FILE, ('; name="purpose"', b"\xff")), "must be UTF-8"),
    "huge field": (form(FILE, ('; name="purpose"', b"x" * 5_000)), "at most 4096 bytes"),
    "many parts": (form(*[(f'; name="f{n}"', b"") for n in range(70)]), "at most 64 parts"),
    "huge header": (form((f'; name="{"x" * 9_000}"', b"")), "not a form"),
    "wrong anchor": (
        form(FILE, PURPOSE, ('; name="expires_after[seconds]"', b"3600")),
        "expires_after.anchor must be created_at",
    ),
    "wrong seconds": (
        form(
            FILE,
            PURPOSE,
            ('; name="expires_after[anchor]"', b"created_at"),
            ('; name="expires_after[seconds]"', b"3.5e9"),
        ),
        "expires_after.seconds must be an integer from 3600 to 2592000",
    ),
}


@pytest.mark.parametrize("name", BAD_FORMS)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
async def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(
    tmp_path: Path, name: str, step: int
) -> None:
    body, message = BAD_FORMS[name]

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), step):
            yield body[start : start + step]

    edge = Edge(FarSide(a=serve), config=config(tmp_path))
    async with edge.client() as client:
        response = await client.post("/v1/files", content=chunks(), headers=BOUNDARY)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    "headers",
    [
        JSON,
        {"content-type": "multipart/form-data"},
        {**BOUNDARY, "content-encoding": "gzip"},
    ],
)
async def test_only_plain_forms_are_taken(tmp_path: Path, headers: dict[str, str]) -> None:
    edge = Edge(FarSide(a=serve), config=config(tmp_path))
    async with edge.client() as client:
        response = await client.post("/v1/files", content=form(FILE, PURPOSE), headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize("announced", [True, False])
async def test_an_upload_is_cut_at_the_limit(
    tmp_path: Path, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.api.MAX_FILE_BYTES", 1 << 16)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield form(FILE, end=b"")[:-2]
        while True:
            sent += 1 << 14
            yield b"x" * (1 << 14)

    edge = Edge(FarSide(a=serve), config=config(tmp_path))
    content: Any = form(('; name="file"', b"x" * (1 << 18)), PURPOSE) if announced else endless()
    async with edge.client() as client:
        response = await client.post("/v1/files", content=content, headers=BOUNDARY)
    assert response.status_code == 413
    assert "allowed: 65536 bytes" in response.json()["error"]["message"]
    assert sent <= 1 << 17
    assert list((tmp_path / "files").iterdir()) == []


class Halting:
    """A form that stops in the middle until it may go on."""

    def __init__(self) -> None:
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = form(FILE, PURPOSE)
        yield body[:20]
        self.began.set()
        await self.go_on.wait()
        yield body[20:]


@pytest.mark.parametrize(
    ("keys", "most", "refusal"),
    [((), 1, (503, "router_full")), ((KEY, OTHER_KEY), 2, (429, "client_full"))],
)
async def test_uploads_under_way_are_bounded(
    tmp_path: Path,
    keys: tuple[str, ...],
    most: int,
    refusal: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In all, and one key leaves places to the others."""
    monkeypatch.setattr("sluice.router.batches.api.MAX_UPLOADS", most)
    slow, content = Halting(), form(FILE, PURPOSE)
    edge = Edge(FarSide(a=serve), config=config(tmp_path, keys))
    mine, other = ({**BOUNDARY, "authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    async with edge.client() as client:
        first = asyncio.create_task(client.post("/v1/files", content=slow, headers=mine))
        await slow.began.wait()
        second = await client.post("/v1/files", content=content, headers=mine)
        assert (second.status_code, second.json()["error"]["code"]) == refusal
        assert int(second.headers["retry-after"]) >= 1
        if keys:
            third = await client.post("/v1/files", content=content, headers=other)
            assert third.status_code == 200
        slow.go_on.set()
        assert (await first).status_code == 200
        fourth = await client.post("/v1/files", content=content, headers=mine)
        assert fourth.status_code == 200


async def test_an_upload_that_does_not_go_on_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.router.batches.api.UPLOAD_TIMEOUT_S", 1.0)
    edge = Edge(FarSide(a=serve), config=config(tmp_path))
    async with edge.client() as client:
        response = await client.post("/v1/files", content=Halting(), headers=BOUNDARY)
    assert response.json()["error"]["code"] == "body_too_slow"
    assert names_in(tmp_path / "files") == []


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"input_file_id": None}, "input_file_id must be the id of a file, got None"),
    ({"endpoint": "/v1/images"}, "must be one of /v1/chat/completions, /v1/completions, /v1/resp"),
    ({"endpoint": ["x"]}, "endpoint must be one of"),
    ({"completion_window": "1h"}, "completion_window must be one of 24h, got '1h'"),
    ({"metadata": "x"}, "metadata must be an object"),
    ({"metadata": {str(n): "" for n in range(17)}}, "at most 16 texts"),
    ({"metadata": {"k": 1}}, "metadata must be"),
    ({"metadata": {"k" * 65: "v"}}, "metadata must be"),
    ({"metadata": {"k": "v" * 513}}, "metadata must be"),
    ({"output_expires_after": 7}, "output_expires_after must be"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": True}},
        "output_expires_after.seconds must be an integer from 3600",
    ),
    ({"priority": 3}, "'priority' is not a known field"),
]


async def test_a_wrong_batch_is_refused(tmp_path: Path) -> None:
    edge = Edge(FarSide(a=serve), config=config(tmp_path))
    good = {"endpoint": URL, "completion_window": "24h"}
    async with edge.client() as client:
        made = await client.post("/v1/files", content=form(FILE, PURPOSE), headers=BOUNDARY)
        for change, message in BAD_BATCHES:
            body = {"input_file_id": made.json()["id"], **good, **change}
            response = await client.post("/v1/batches", json=body)
            error = response.json()["error"]
            assert (response.status_code, message in error["message"]) == (400, True), error
            assert error["param"].removesuffix(".seconds") in change
        response = await client.post("/v1/batches", content=b"[]", headers=JSON)
        assert response.json()["error"]["code"] == "invalid_json"
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_limits_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("MAX_FILES", 3), ("MAX_UNFINISHED", 2), ("MAX_ENDED", 1)):
        monkeypatch.setattr(f"sluice.router.batches.state.{name}", limit)
    side = FarSide(a=Held(0))
    now = UnixClock()
    async with serving(config(tmp_path, [KEY, OTHER_KEY]), side, now) as router:
        client = router.of(KEY)
        batches = []
        for _ in range(2):
            now.now_s += 1
            batches.append((await submit(client, [line("a")])).id)
        with pytest.raises(openai.PermissionDeniedError, match="2 batches that have not ended"):
            await submit(client, [line("b")])
        with pytest.raises(openai.PermissionDeniedError, match="3 files, which is the limit"):
            await upload(client, [line("c")])
        await submit(router.of(OTHER_KEY), [line("d")])
        for batch_id in batches:
            await client.batches.cancel(batch_id)
            await until(client, batch_id, "cancelled")
        (file, *_) = [entry async for entry in client.files.list(purpose="batch")]
        now.now_s += 1
        again = await client.batches.create(
            input_file_id=file.id, endpoint=URL, completion_window="24h"
        )
        # Of the two that have ended only the younger is remembered.
        assert [batch.id async for batch in client.batches.list()] == [again.id, batches[1]]
        assert len([batch async for batch in router.of(OTHER_KEY).batches.list()]) == 1


async def test_results_are_kept_as_long_as_was_asked_and_are_no_input(tmp_path: Path) -> None:
    now = UnixClock()
    async with serving(config(tmp_path), now=now) as router:
        expires: Any = {"anchor": "created_at", "seconds": 7_200}
        made = await submit(router.client, [line("a")], output_expires_after=expires)
        done = await until(router.client, made.id, "completed")
        output = await router.client.files.retrieve(str(done.output_file_id))
        assert output.expires_at == now.now_s + 7_200
        assert output.purpose == "batch_output"
        with pytest.raises(openai.BadRequestError, match="with the purpose batch"):
            await router.client.batches.create(
                input_file_id=output.id, endpoint=URL, completion_window="24h"
            )


async def test_a_full_store_is_the_servers_fault(tmp_path: Path) -> None:
    async with serving(config(tmp_path, [KEY, OTHER_KEY], max_bytes=1_024)) as router:
        await upload(router.of(KEY), [line("a", text="x" * 600)])
        with pytest.raises(openai.InternalServerError, match="is full") as full:
            await upload(router.of(OTHER_KEY), [line("a", text="x" * 600)])
        assert (full.value.status_code, full.value.code) == (507, "storage_full")


async def test_without_a_folder_it_is_said_what_to_set() -> None:
    edge = Edge(FarSide(a=serve))
    async with edge.client() as client:
        for method, path in [
            ("POST", "/v1/files"),
            ("GET", f"/v1/files/{FOREVER}/content"),
            ("DELETE", f"/v1/files/{FOREVER}"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches/x/cancel"),
        ]:
            response = await client.request(method, path)
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["code"] == "batches_off"
            assert "set router.batches.directory" in error["message"]


def test_a_folder_must_be_absolute_and_the_class_known() -> None:
    with pytest.raises(ValidationError, match="must be an absolute path"):
        BatchesConfig(directory=Path("here"))
    with pytest.raises(ValidationError, match="service_class 'none' is not one of"):
        RouterConfig(batches=BatchesConfig(directory=Path("/x"), service_class="none"))
    with pytest.raises(ValidationError, match="must look like 30m, 24h or 7d"):
        BatchesConfig(completion_windows=("soon",))


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        Edge(FarSide(a=serve), config=config(tmp_path / "file"))


# What docs/batches.md says.

DOCUMENT = ROOT / "docs" / "batches.md"


async def test_the_example_runs(tmp_path: Path) -> None:
    (script,) = marked(DOCUMENT, "run: python")
    async with serving(config(tmp_path)) as router:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script.replace("http://127.0.0.1:8000/v1", router.url),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    first, *lines = output.decode().splitlines()
    assert process.returncode == 0
    assert first.startswith("completed BatchRequestCounts(completed=3, failed=0, total=3")
    assert sorted(lines) == [f"question-{number} 200" for number in range(3)]


def test_the_limits_are_the_defaults() -> None:
    defaults = BatchesConfig().model_dump()
    told = {
        name: float(cells[0].replace(",", ""))
        for name, cells in rows(section(DOCUMENT, "Limits")).items()
    }
    assert told == {name: defaults[name] for name in told}
    others = {"directory", "url", "service_class", "completion_windows"}
    assert defaults.keys() - told.keys() == others
