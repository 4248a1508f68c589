"""Labels of Ray's nodes, by which configurations place routers and replicas."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

LabelName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        max_length=253,
    ),
]
"""Name of a label of a Ray node, as Ray takes it."""

LabelValue = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")
]
"""Value of a label of a Ray node."""
