"""What a process does first that becomes the fork server of a replica, and ends with it."""

from sluice.replica.processes import prepare_forks

prepare_forks()

import sluice.replica.vllm.preload  # noqa: E402, F401
