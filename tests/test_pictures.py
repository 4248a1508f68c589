from __future__ import annotations

from PIL import Image

from tests import pictures

AGAIN = "make pictures"


def test_the_picture_of_the_page_is_of_its_sources_now() -> None:
    with Image.open(pictures.PAGE) as shot:
        assert shot.text[pictures.DIGEST] == pictures.digest(pictures.page_sources()), AGAIN


def test_the_chart_is_of_the_results_that_are_there() -> None:
    digest = pictures.digest([pictures.RESULTS])
    assert f"<!-- {pictures.DIGEST} {digest} -->" in pictures.PEERS.read_text("utf-8"), AGAIN
