"""The generated admin key of a run without a configured one, and the address of the live page."""

from __future__ import annotations

import secrets

from pydantic import SecretStr

from sluice.deploy.config import SluiceConfig
from sluice.router.admin_config import AdminConfig


def with_admin_key(config: SluiceConfig) -> tuple[SluiceConfig, str | None]:
    """The configuration with a generated admin key, and the key; the unchanged configuration and
    ``None`` if keys are configured or none is needed."""
    admin = config.router.admin
    if admin.access != "key" or admin.has_keys:
        return config, None
    key = secrets.token_urlsafe(32)
    made = AdminConfig(keys=(SecretStr(key),))
    router = config.router.model_copy(update={"admin": made})
    return config.model_copy(update={"router": router}), key


def page_address(config: SluiceConfig, url: str, key: str | None) -> str | None:
    """The address of the live page below ``url``; ``None`` if the page is off. The key is in the
    URL's fragment, which browsers never send."""
    if config.router.admin.access == "off":
        return None
    return f"{url}/ui" if key is None else f"{url}/ui#key={key}"
