from __future__ import annotations

import pytest
from PIL import Image

from tests import pictures

AGAIN = "make pictures"


@pytest.mark.parametrize("screen", pictures.SCREENS)
@pytest.mark.parametrize("scene", pictures.SCENES)
def test_the_pictures_of_the_page_are_of_its_sources_now(scene: str, screen: str) -> None:
    path = pictures.picture(scene, screen)
    assert path.stat().st_size < 150_000
    with Image.open(path) as shot:
        assert shot.text[pictures.DIGEST] == pictures.digest(pictures.page_sources()), AGAIN


def test_the_chart_is_of_the_results_that_are_there() -> None:
    digest = pictures.digest([pictures.RESULTS])
    assert f"<!-- {pictures.DIGEST} {digest} -->" in pictures.PEERS.read_text("utf-8"), AGAIN
