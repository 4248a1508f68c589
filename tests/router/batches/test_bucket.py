"""Files and batches whose bytes are in a bucket: the tests of a folder again, on a local S3."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from pydantic import ValidationError

from sluice.deploy.ray_start import free_port
from sluice.router.batches.byte_store import PART_BYTES
from sluice.router.config import BatchesConfig
from tests.router.batches import routers
from tests.router.batches.routers import config, jsonl, line, names_in, serving, submit, until

# The same tests, with their bytes elsewhere.
from tests.router.batches.test_files_and_lists import (  # noqa: F401
    test_lists_go_on_after_what_was_seen,
    test_nobody_sees_what_belongs_to_another_key,
    test_results_are_kept_as_long_as_was_asked_and_are_no_input,
    test_uploads_under_way_are_bounded,
)
from tests.router.batches.test_run_batches import (  # noqa: F401
    test_a_batch_is_run_as_best_effort_and_gives_its_results,
    test_a_router_that_starts_goes_on_where_another_stopped,
    test_cancelling_stops_what_is_under_way_and_keeps_what_is_done,
    test_routers_share_a_folder_and_run_each_batch_once,
    test_what_is_left_at_the_end_of_the_window_expires,
)
from tests.router.far_side import Edge, FarSide, serve


@pytest.fixture(scope="module")
def s3() -> Iterator[httpx.Client]:
    """A local S3 server, in a process of its own: engines that start in this process look at every
    loaded module, and flask's do not survive that."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    transport = httpx.HTTPTransport(retries=20)  # with pauses that grow, until it listens
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=120
        ) as client:
            yield client
    finally:
        server.terminate()
        server.wait()


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def bucket(s3: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, in which all stores of a test keep their bytes."""
    name = f"bucket-{next(_numbers)}"
    assert s3.put(f"/{name}").is_success
    monkeypatch.setattr(routers, "bytes_url", f"s3://{name}/some/prefix")
    for variable, value in {
        "AWS_ENDPOINT_URL": str(s3.base_url),
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(variable, value)
    return name


def objects(s3: httpx.Client, bucket: str) -> dict[str, str]:
    """The names of a bucket's objects with their tags, which say in how many parts they came."""
    found = ET.fromstring(s3.get(f"/{bucket}?list-type=2").text)
    space = "{http://s3.amazonaws.com/doc/2006-03-01/}"
    return {
        each.findtext(f"{space}Key", ""): each.findtext(f"{space}ETag", "").strip('"')
        for each in found.iter(f"{space}Contents")
    }


async def test_bytes_are_in_the_bucket_and_the_state_is_in_the_folder(
    tmp_path: Path, s3: httpx.Client, bucket: str
) -> None:
    async with serving(config(tmp_path)) as router:
        client = router.client
        done = await until(client, (await submit(client, [line("a")])).id, "completed")
        ids = [file.id async for file in client.files.list()]
        assert sorted(ids) == sorted([done.input_file_id, str(done.output_file_id)])
        assert objects(s3, bucket).keys() == {f"some/prefix/{each}" for each in ids}
        for file_id in ids:
            await client.files.delete(file_id)
        assert objects(s3, bucket) == {}
        with pytest.raises(openai.NotFoundError):
            await client.files.content(done.input_file_id)
    assert names_in(tmp_path) == ["routers", "state.sqlite3"]


async def test_a_large_file_goes_in_parts(tmp_path: Path, s3: httpx.Client, bucket: str) -> None:
    content = random.Random(1).randbytes(2 * PART_BYTES + 1)
    async with serving(config(tmp_path)) as router:
        made = await router.client.files.create(file=content, purpose="batch")
        assert (await router.client.files.content(made.id)).content == content
    (tag,) = objects(s3, bucket).values()
    assert tag.endswith("-3"), "parts"


@pytest.mark.parametrize("size", [100, 2 * PART_BYTES])
async def test_a_refused_upload_leaves_nothing(
    tmp_path: Path, s3: httpx.Client, bucket: str, size: int
) -> None:
    async with serving(config(tmp_path, max_bytes_per_key=1_024)) as router:
        files = router.client.files
        await files.create(file=b"x" * 1_000, purpose="batch")
        before = objects(s3, bucket)
        with pytest.raises(openai.PermissionDeniedError, match="allowed: 1024"):
            await files.create(file=b"x" * size, purpose="batch")
        assert objects(s3, bucket) == before


async def test_a_bucket_that_is_missing_fails_uploads_alone(tmp_path: Path) -> None:
    async with serving(config(tmp_path, url="s3://missing")) as router:
        with pytest.raises(openai.InternalServerError):
            await router.client.files.create(file=jsonl([line("a")]), purpose="batch")
        assert [file async for file in router.client.files.list()] == []
        assert (await router.client.models.list()).data


def test_without_its_package_a_bucket_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    with pytest.raises(OSError, match=r"install sluice-serve\[object-storage\]"):
        Edge(FarSide(a=serve), config=config(tmp_path))


@pytest.mark.parametrize(
    "url", ["bucket", "/folder", "s3://", "s3:///x", "http://host/x", "s3://key:secret@bucket"]
)
def test_a_url_names_a_bucket(url: str) -> None:
    with pytest.raises(ValidationError, match=r"must look like s3://bucket/prefix"):
        BatchesConfig(url=url)
    assert BatchesConfig(url="gs://bucket").url == "gs://bucket"
