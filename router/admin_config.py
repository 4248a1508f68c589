"""Configuration of access to the admin API and the live page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sluice.router.tenancy.keys import KeyEntry, KeyFile, check_bare, check_entries


class AdminConfig(BaseModel):
    """The admin API under `/admin/v1` and the live page at `/ui`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    access: Literal["off", "key", "open"] = Field(
        default="key",
        description="`off`: no admin API and no page; `key`: an admin key is required, and without "
        "configured keys access is refused; `open`: no key, only with `sluice serve` on a loopback "
        "`router.host`.",
    )
    keys: tuple[KeyEntry, ...] = Field(
        default=(),
        max_length=100,
        description="Keys for the admin API only; API keys do not give access to it.",
    )
    keys_file: KeyFile | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys, on every node with a router. "
        "It is read again when it changes.",
    )

    @model_validator(mode="after")
    def _check_keys(self) -> AdminConfig:
        check_entries(self.keys, (), "admin.keys")
        check_bare(self.keys, "admin.keys")
        if self.access != "key" and (self.keys or self.keys_file is not None):
            raise ValueError(f"admin.access is {self.access}, so admin keys would open nothing")
        return self

    @property
    def has_keys(self) -> bool:
        """Whether an admin key is configured."""
        return bool(self.keys) or self.keys_file is not None
