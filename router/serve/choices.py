"""Who learns which replica Serve has chosen for a request, before that answers. Serve copies its
request router's module by value, so what that shares with the process stands here and in
``running``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

CHOSEN: Final[dict[str, Callable[[str], None]]] = {}
"""Of this process, by the id of an open request: called with each replica chosen for it."""
