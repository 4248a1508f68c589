"""What Sluice adds to each worker process of an engine that has several."""

from __future__ import annotations

from sluice.replica.parent_watch import end_with_parent

EXTENSION = "sluice.replica.vllm.worker_extension.WorkerExtension"
"""Its name for vLLM's argument ``worker-extension-cls``."""


class WorkerExtension:
    """Methods for vLLM's worker, by its ``collective_rpc``."""

    def end_with_engine(self) -> None:
        """End with the engine's process, also while this worker waits for another one or for a
        device: vLLM's own watch cannot end it there. An actor of Ray ends with its job."""
        end_with_parent()
