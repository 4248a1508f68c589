"""The folder of files and batches of a `sluice serve` without a configured one."""

from __future__ import annotations

from sluice.deploy.config import SluiceConfig
from sluice.deploy.local_runs import state_folder
from sluice.router.batches.folders import make_folder


def with_batches_folder(config: SluiceConfig) -> SluiceConfig:
    """The configuration with a folder that only this user can read, and that the next run on this
    port finds again; the unchanged configuration if a folder is configured, if no class is there
    for batches, or if the folder cannot be made."""
    batches = config.router.batches
    if batches.directory is not None or batches.service_class not in config.router.classes:
        return config
    try:
        folder = state_folder().absolute() / "batches" / str(config.router.port)
        make_folder(folder)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return config
    batches = batches.model_copy(update={"directory": folder})
    router = config.router.model_copy(update={"batches": batches})
    return config.model_copy(update={"router": router})
