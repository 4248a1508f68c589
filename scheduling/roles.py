"""What a replica does of a request."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["mixed", "prefill", "decode"]
"""Both phases, or one. A replica of any role can serve a request whole where no other is left."""

ROLES: tuple[Role, ...] = get_args(Role)

WHOLE: tuple[Role, ...] = ("mixed", "decode", "prefill")
"""Roles that serve a whole request where no P/D pair does, in order of preference."""
