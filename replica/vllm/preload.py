"""What a process imports from which an engine's processes fork."""

import gc

from sluice.telemetry.phases import phase

_DOWNLOAD = "snapshot_download"

gc.disable()  # collections take a quarter of an import's time, and find nothing
with phase("import vLLM"):
    import vllm.v1.engine.core  # noqa: F401
    from huggingface_hub import HfApi
    from vllm.v1.executor.abstract import Executor

    import sluice.replica.grammar.check
    import sluice.replica.vllm.scheduler
    import sluice.replica.vllm.setup  # noqa: F401
    from sluice.replica.vllm.download import in_phase
    from sluice.scheduling.request.kernels import load_numba

    load_numba()
for method, name in {
    "__init__": "load the model",
    "determine_available_memory": "profile memory",
    "initialize_from_config": "allocate the KV cache",
    "compile_or_warm_up_model": "compile and warm up",
}.items():
    setattr(Executor, method, phase(f"engine: {name}")(getattr(Executor, method)))
# vLLM gets weights with it; a folder of weights is not downloaded.
setattr(HfApi, _DOWNLOAD, in_phase(getattr(HfApi, _DOWNLOAD)))
# A collection in a fork would write to each object, and so copy the memory that they share.
gc.collect()
gc.freeze()
gc.enable()
