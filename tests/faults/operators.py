"""An application that this process has not joined: it is reached as its operator reaches it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sluice.deploy.commands.admin import AdminApi
from sluice.deploy.commands.options import Failure
from sluice.deploy.config import parse_config
from tests.faults.scenario import Trial

_KEY = "an-admin-key-of-the-faults"
ADMIN = {"keys": [_KEY]}
"""Of ``router.admin`` in its configuration."""


class OperatorTrial(Trial):
    """What the admin API shows."""

    def __init__(self, fields: dict[str, Any], url: str) -> None:
        super().__init__(parse_config(fields), url)

    def snapshot(self) -> dict[str, Any]:
        with suppress(Failure):
            rows = AdminApi(self.url, _KEY).fleet()["replicas"]
            return {"replicas": rows, "reservations": sum(row["reserved"] for row in rows)}
        return {"replicas": [], "reservations": None}

    def has_heard_of_all(self) -> bool:
        return True  # the admin API does not show it
