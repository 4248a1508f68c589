"""How vLLM is started: environment, arguments, engine and its OpenAI serving layer."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import importlib.util
import io
import json
import logging
import os
import pkgutil
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from llvmlite.binding import ffi  # type: ignore[import-untyped]
from pydantic import ValidationError

from sluice.protocol.requests import Endpoint
from sluice.replica.config import EngineConfig, TransferConfig
from sluice.replica.private_dir import SOCKETS_VARIABLE, make_private_dir
from sluice.replica.processes import EXTENSION, EngineContext, on_cpu, start_fork_server
from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.scheduler.xargs import SchedulerSettings
from sluice.replica.vllm.contract import ASYNC_TRANSFER, age, located
from sluice.replica.vllm.serving import Serving, servings
from sluice.replica.vllm_args import by_option, check_names, workers
from sluice.scheduling.roles import Role
from sluice.telemetry.phases import phase

_PREEMPTION: Final = "sluice.replica.preemption"
"""By name only, as vLLM finds what is in it: the package is built on this one."""


def preemption_arguments(ranks: int) -> dict[str, Any]:
    """vLLM's arguments that preemption of running prefills requires, with ``ranks`` workers."""
    executor = "PreemptiveExecutor" if ranks == 1 else "PreemptiveGroupExecutor"
    return {
        "distributed-executor-backend": f"{_PREEMPTION}.executor.{executor}",
        "async-scheduling": False,
        "scheduler-cls": f"{_PREEMPTION}.support.make_scheduler",
    }


# Which of vLLM's tool parsers reads the calls of a model.
#
# A chat template shows the model the format of its calls, so the format follows from the template,
# whatever the model is called. vLLM itself wants its name.

logger = logging.getLogger(__name__)

_MARKS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>", "commentary")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    # DeepSeek-V3 and R1 put the arguments into a fence, later versions do not.
    ("deepseek_v3", ("<\uff5ctool▁calls▁begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool▁calls▁begin\uff5c>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|eot_id|>", "parameters", "function")),
)
"""vLLM's parsers, and what a template of their format contains; the first that fits counts."""


def parser_of(template: str) -> str | None:
    """The tool parser for a chat template; ``None`` if its format is not known or has no tools."""
    if "tools" not in template:
        return None
    return next((name for name, marks in _MARKS if all(m in template for m in marks)), None)


def choose_parser(arguments: Any, tokenizer: Any) -> None:
    """Let the model call tools, in vLLM's parsed ``arguments``, unless they say how it does."""
    if arguments.enable_auto_tool_choice or arguments.tool_call_parser or tokenizer is None:
        return
    template = _template(arguments.chat_template, tokenizer)
    found = parser_of(template)
    if found is not None and _exists(found):
        arguments.enable_auto_tool_choice, arguments.tool_call_parser = True, found
        logger.info("tool calls are read by vLLM's parser %s, by the chat template", found)
    elif "tools" in template:
        logger.warning(
            "the chat template has tools in a format that is not known here, so requests with "
            "tools are refused: set enable-auto-tool-choice and tool-call-parser in "
            "engine.vllm_args"
        )


def _template(stated: Any, tokenizer: Any) -> str:
    if stated:
        # A file, or the template itself, as vLLM takes it.
        is_file = "{" not in str(stated) and Path(stated).is_file()
        return Path(stated).read_text(encoding="utf-8") if is_file else str(stated)
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):  # several, by use
        own = own.get("tool_use", own.get("default"))
    return own if isinstance(own, str) else ""


def _exists(parser: str) -> bool:
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(parser) is not None
    except (KeyError, ImportError):
        return False


KV_CONNECTOR_MODULE = "sluice.replica.vllm.kv_connector"
SENDS_KV = "kv_producer"  # vLLM's name for an engine that sends KV, and receives none

_TRANSFER = "kv-transfer-config"

_OFFLOADING = "kv-offloading-size"

_ON_GPUS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""vLLM's connectors that copy KV between a GPU and the memory of its host."""

_LMCACHE_ON_GPUS = "LMCacheConnectorV1"
"""Begins the names of the connectors that run LMCache in the engine's process. On a CPU build, with
LMCache 0.5.6, such an engine starts, keeps nothing, and waits 3 s at each longer prompt."""


class Launched(NamedTuple):
    """A started engine with vLLM's OpenAI serving layer on it."""

    llm: Any
    models: Any
    servings: dict[Endpoint, Serving]


def prepare_environment(model: str, one_thread: bool, preemption: bool = False) -> None:
    """Set the environment of vLLM and its libraries, for this process and the engine's. With a path
    as ``model`` no network is used; ``preemption`` needs vLLM's first model runner."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if SOCKETS_VARIABLE not in os.environ:
        # Set once for the process, as vLLM reads it once.
        sockets = make_private_dir()
        atexit.register(shutil.rmtree, sockets, ignore_errors=True)
        os.environ[SOCKETS_VARIABLE] = str(sockets)
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if preemption:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        # As vLLM does on CPUs and in Ray's actors: a fork would have this process's locks.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if on_cpu():
        if one_thread:
            os.environ["OMP_NUM_THREADS"] = "1"
        # Without it vLLM puts the model into one more process, behind one more queue.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def survive_module_scan() -> None:
    """Have vLLM's scan of all loaded modules survive numba's; call it before an engine starts. vLLM
    0.32 on CPUs reads ``__dict__`` of everything, and llvmlite's library handle answers any name
    with a C function: so it gets a dictionary."""
    functions = getattr(ffi.lib, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


# An engine's process first imports the main module of the one that started it, with compiled
# policies perhaps; nothing else of ours runs there before the scan.
survive_module_scan()


def parse_arguments(
    given: dict[str, Any],
    model: str,
    served_name: str,
    settings: SchedulerSettings,
    keep_times: bool = False,
    transfer: TransferConfig | None = None,
    role: Role = "mixed",
) -> Any:
    """vLLM's parsed arguments, by option name without dashes. ``keep_times``: record first
    schedules. Raises UnsupportedVllmError. Raises ValueError: an argument is refused or reserved.
    """
    from sluice.replica.vllm.support import check_vllm

    # Before anything else is imported of vLLM: what is missing is named, all at once.
    check_vllm(serving=True)

    arguments = by_option(given)
    check_names(arguments)
    needed = preemption_arguments(workers(arguments)) if settings.preemption is not None else {}
    for name, value in needed.items():
        if arguments.get(name, value) != value:
            raise ValueError(f"vllm_args: with preemption, {name} must be {value}")
    arguments |= _speculation_arguments(arguments)
    _check_kv_tier(arguments)
    if transfer is not None:
        arguments[_TRANSFER] = transfer_argument(transfer, role)
    if arguments.get(_TRANSFER) is not None or arguments.get(_OFFLOADING) is not None:
        arguments |= _in_step(arguments)
    if on_cpu():
        arguments = _cpu_defaults(arguments) | arguments
    if not needed and workers(arguments) > 1:
        arguments.setdefault("worker-extension-cls", EXTENSION)
    arguments |= {
        "model": model,
        "served-model-name": served_name,
        "scheduler-cls": "sluice.replica.vllm.scheduler.make_scheduler",
        "scheduling-policy": "fcfs",
        "additional-config": settings.to_additional_config(),
        # vLLM's own tracing fails without its times.
        "disable-log-stats": None if keep_times or "otlp-traces-endpoint" in arguments else True,
        **needed,
    }
    parsed = _parsed(arguments)
    _check_parsers(parsed)
    return parsed


def check_arguments(given: dict[str, Any]) -> None:
    """Check that vLLM's parser takes these arguments, on any machine. Raises ValueError."""
    parsed = _parsed({**by_option(given), "model": "model"})
    if not (parsed.tool_parser_plugin or parsed.reasoning_parser_plugin):
        _check_parsers(parsed)


def _parsed(arguments: dict[str, Any]) -> Any:
    """What vLLM's parser makes of ``arguments``. Raises ValueError: it refuses one."""
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from sluice.replica.vllm.support import ARGUMENTS

    cli = located(ARGUMENTS)
    parser = cli.make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    errors = io.StringIO()
    try:
        _check_known(arguments, parser)
        with contextlib.redirect_stderr(errors):
            parsed = parser.parse_args(_command_line(arguments))
        if parsed.model_tag is not None:  # a word that belongs to no option
            raise ValueError(f"{parsed.model_tag!r} is one value too many for its option")
        cli.validate_parsed_serve_args(parsed)
    except (SystemExit, ValueError, TypeError) as error:
        reason = _reason(errors.getvalue()) if isinstance(error, SystemExit) else str(error)
        raise ValueError(f"vllm_args: vLLM {vllm.__version__} refuses them: {reason}") from error
    return parsed


def _check_parsers(parsed: Any) -> None:
    """Check parsers, which vLLM looks for only once the engine has loaded. Raises ValueError."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if parsed.tool_parser_plugin:
        ToolParserManager.import_tool_parser(parsed.tool_parser_plugin)
    if parsed.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(parsed.reasoning_parser_plugin)
    reasoning = parsed.reasoning_parser or parsed.structured_outputs_config.reasoning_parser
    for option, name, manager in (
        ("tool-call-parser", parsed.tool_call_parser, ToolParserManager),
        ("reasoning-parser", reasoning, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name and name not in known:
            raise ValueError(
                f"vllm_args: {option}: there is no {name!r}, only {', '.join(sorted(known))}"
            )


def _check_known(arguments: dict[str, Any], parser: Any) -> None:
    """Raises ValueError: unknown names, without their values, which may be tokens."""
    known = {option[2:] for option in parser._option_string_actions if option.startswith("--")}
    unknown = [
        f"{name} is no option" + "".join(f"; did you mean {near}?" for near in nearest)
        for name in arguments.keys() - known
        for nearest in [difflib.get_close_matches(name, known, n=1)]
    ]
    if unknown:
        raise ValueError("; ".join(sorted(unknown)))


def engine_arguments(
    engine: EngineConfig,
    model: str,
    settings: SchedulerSettings,
    role: Role = "mixed",
    keep_times: bool = False,
) -> Any:
    """vLLM's parsed arguments for ``engine``. Raises as ``parse_arguments``."""
    given = engine.vllm_args
    if engine.model == "local" and on_cpu():
        # vLLM would choose bfloat16, which is slow on CPUs without instructions for it. Other
        # models keep vLLM's `dtype`: some kinds of quantization refuse float32.
        given = {"dtype": "float32", **by_option(given)}
    return parse_arguments(
        given, model, engine.served_name, settings, keep_times, engine.transfer, role
    )


def _reason(text: str) -> str:
    """The reason in the parser's output: its usage comes before, links after."""
    reason = text.rpartition(" error: ")[2].partition("For further information")[0]
    return " ".join(reason.split())[:500]


def engine_config(arguments: Any) -> Any:
    """vLLM's configuration, checked here as the engine's process only logs its reasons. Raises
    UnsupportedVllmError. Raises ValueError: an impossible configuration."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from sluice.replica.vllm.kv_connector import check_model
    from sluice.replica.vllm.support import check_config

    try:
        vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        )
        check_config(vllm_config)
        settings = SchedulerSettings.from_additional_config(vllm_config.additional_config)
        if settings.preemption is not None:
            importlib.import_module(f"{_PREEMPTION}.support").check_preemption(vllm_config)
        check_model(vllm_config)
        _look_up(arguments, vllm_config)
    except ValidationError as error:  # of vLLM, whose text shows its whole input
        raise ValueError("; ".join(each["msg"] for each in error.errors())) from error
    except (AssertionError, AttributeError, ImportError, LookupError, TypeError) as error:
        # Such as a KeyError of a registry.
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return vllm_config


def _look_up(arguments: Any, vllm_config: Any) -> None:
    """Find what is configured by name. What this vLLM looks up elsewhere is left to the engine's
    process. Raises ValueError: there is no such thing."""
    resolve = "utils.import_utils:resolve_obj_by_qualname"
    own_format = arguments.load_format not in (None, "auto")
    lookups = [
        (
            "load-format",
            "model_executor.model_loader:get_model_loader",
            vllm_config.load_config if own_format else None,
        ),
        ("worker-cls", resolve, arguments.worker_cls),
        ("worker-extension-cls", resolve, arguments.worker_extension_cls),
        (
            "tokenizer-mode",
            "tokenizers.registry:TokenizerRegistry.load_tokenizer_cls",
            vllm_config.model_config.tokenizer_mode,
        ),
        (
            "logits-processors",
            "v1.sample.logits_processor:_load_logitsprocs_by_fqcns",
            arguments.logits_processors,
        ),
        (
            "ec-transfer-config",
            "distributed.ec_transfer.ec_connector.factory:ECConnectorFactory.get_connector_class",
            vllm_config.ec_transfer_config,
        ),
    ]
    for option, function, value in lookups:
        # Sluice's own exist, and take seconds to import.
        if not value or value == "auto" or str(value).startswith("sluice."):
            continue
        try:
            look_up = pkgutil.resolve_name(f"vllm.{function}")
        except (ImportError, AttributeError):
            continue
        try:
            look_up(value)
        except Exception as error:
            raise ValueError(f"vllm_args: {option}: {error}") from error
    if plugin := arguments.io_processor_plugin:
        from vllm.plugins import IO_PROCESSOR_PLUGINS_GROUP, load_plugins_by_group

        if plugin not in load_plugins_by_group(IO_PROCESSOR_PLUGINS_GROUP):
            raise ValueError(f"vllm_args: io-processor-plugin: {plugin} is not installed")


@cache
def _fork_engines() -> None:
    """Have vLLM fork its engines' processes from the fork server."""
    from vllm.v1.engine import utils

    start_fork_server()
    choose = utils.get_mp_context

    def context() -> EngineContext:
        choose()  # how workers start
        return EngineContext()

    utils.get_mp_context = context


async def launch(arguments: Any, grammar_check_s: float = 0.0) -> Launched:
    """Start the engine process and its serving layer. ``grammar_check_s``: CPU seconds of each
    phase of a check; 0: no check. Raises as ``engine_config``, and RuntimeError: it did not start.
    """
    with phase("replica: configure vLLM"):
        from starlette.datastructures import State
        from vllm.usage.usage_lib import UsageContext

        from sluice.replica.grammar.bound import BoundedGrammar
        from sluice.replica.grammar.check import GrammarCheck
        from sluice.replica.vllm.client import WatchedLLM
        from sluice.replica.vllm.scheduler import SloAsyncScheduler, SloScheduler
        from sluice.replica.vllm.support import APP_STATE, check_overrides
        from sluice.replica.vllm.tokenizing import tokenize_lightly

        check_overrides("Sluice", SloScheduler, SloAsyncScheduler, WatchedLLM, BoundedGrammar)
        vllm_config = engine_config(arguments)
    if not getattr(vllm_config.parallel_config, "numa_bind", False):  # which needs spawned ones
        _fork_engines()
    grammars = None
    if grammar_check_s > 0 and _has_grammars(vllm_config):
        grammars = GrammarCheck(vllm_config, grammar_check_s)
        grammars.start()  # while the engine loads
    try:
        with phase("replica: the engine's process"):
            llm = WatchedLLM.from_vllm_config(
                vllm_config=vllm_config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                disable_log_stats=arguments.disable_log_stats,
            )
    except BaseException:
        if grammars is not None:
            grammars.stop()
        raise
    llm.grammars = grammars
    tokenize_lightly(getattr(llm, "renderer", None))
    if arguments.worker_extension_cls == EXTENSION:
        await llm.collective_rpc("end_with_engine")
    if vllm_config.model_config.runner_type == "generate":
        choose_parser(arguments, llm.get_tokenizer())
    with phase("replica: serving layer"):
        state, tasks = State(), await llm.get_supported_tasks()
        await located(APP_STATE).init_app_state(llm, state, arguments, supported_tasks=tasks)
        return Launched(llm, state.openai_serving_models, servings(state, tasks))


def _has_grammars(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return model.runner_type == "generate" and not model.skip_tokenizer_init


def client_error_types() -> tuple[type[Exception], ...]:
    """What vLLM raises for a client's mistakes."""
    import vllm.exceptions

    # Up to 0.27 or so they are all ValueErrors.
    return (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))


def _speculation_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM arguments that let the plan choose how many drafted tokens are checked."""
    if given.get("speculative-config") is None:
        return {}
    if given.get("async-scheduling"):
        raise ValueError("vllm_args: with speculative-config, async-scheduling must be False")
    try:
        config = with_all_lengths(given["speculative-config"])
    except ValueError as error:
        raise ValueError(f"vllm_args: {error}") from error
    return {"speculative-config": config, "async-scheduling": False}


def _check_kv_tier(given: dict[str, Any]) -> None:
    """Check that a connector to KV in other memory can run here. Raises ValueError: it cannot."""
    config = given.get(_TRANSFER)
    if isinstance(config, str):
        with contextlib.suppress(ValueError):  # vLLM's parser says what is wrong
            config = json.loads(config)
    connector = str(config.get("kv_connector")) if isinstance(config, dict) else ""
    if given.get(_OFFLOADING) is not None:
        lmcache = given.get("kv-offloading-backend") == "lmcache"
        connector = "LMCacheMPConnector" if lmcache else "OffloadingConnector"
    if connector in _ON_GPUS and on_cpu():
        raise ValueError(
            f"vllm_args: vLLM's {connector} copies KV between a GPU and the memory of its host, "
            "and this is vLLM's CPU build"
        )
    if connector.startswith(_LMCACHE_ON_GPUS) and on_cpu():
        raise ValueError(
            f"vllm_args: {connector} copies KV between a GPU and LMCache, and this is vLLM's CPU "
            "build: LMCacheMPConnector can copy from CPUs"
        )
    if connector.startswith("LMCache") and importlib.util.find_spec("lmcache") is None:
        raise ValueError(f"vllm_args: {connector} needs the package lmcache, which is not there")


def transfer_argument(transfer: TransferConfig, role: Role = "mixed") -> dict[str, Any]:
    """vLLM's configuration of the KV transfer for this ``role``: with Sluice's own connector one
    for prefills only sends KV, all others also receive. Raises ValueError: it cannot run here."""
    shared = {"kv_load_failure_policy": "recompute"}
    has_nixl = importlib.util.find_spec("nixl") is not None
    if transfer.connector == "nixl" and not has_nixl:
        raise ValueError("engine.transfer.connector is nixl, but its package is not installed")
    if transfer.connector == "nixl" or (transfer.connector == "auto" and has_nixl and not on_cpu()):
        _prepare_nixl()
        return {"kv_connector": "NixlConnector", "kv_role": "kv_both", **shared}
    return {
        "kv_connector": "TcpConnector",
        "kv_connector_module_path": KV_CONNECTOR_MODULE,
        "kv_role": SENDS_KV if role == "prefill" else "kv_both",
        "kv_connector_extra_config": {"sluice": transfer.model_dump(mode="json")},
        **shared,
    }


def _in_step(given: dict[str, Any]) -> dict[str, Any]:
    """vLLM arguments without asynchronous scheduling, which loses tokens beside connectors."""
    import vllm

    if age(vllm.__version__, ASYNC_TRANSFER) != "older":
        return {}
    if given.get("async-scheduling"):
        raise ValueError(
            "vllm_args: before vLLM 0.32 a KV connector needs async-scheduling to be False"
        )
    return {"async-scheduling": False}


def _prepare_nixl() -> None:
    """Set where other engines learn how to read this one's memory: NIXL reads its environment."""
    from vllm.utils.network_utils import get_ip, get_open_port

    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", get_ip())
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(get_open_port()))


def _cpu_defaults(given: dict[str, Any]) -> dict[str, Any]:
    # vLLM would take a share of all memory.
    defaults: dict[str, Any] = {
        "enforce-eager": True,
        "kv-cache-memory-bytes": 256 << 20,
        "worker-cls": "sluice.replica.vllm.cpu_worker.PatchedCpuWorker",
    }
    if workers(given) == 1:
        defaults["distributed-executor-backend"] = "uni"
    return defaults


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _command_line(arguments: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(_word, value)]
        else:
            words.append(f"--{name}={_word(value)}")
    return words
