"""Real inference: vLLM with Sluice's scheduler in it, behind the engine contract and vLLM's own
OpenAI serving layer. vLLM is imported when an engine starts: its environment must be set first."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter, ValidationError

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import (
    EVENT_STREAM,
    SPEECH,
    UNABLE,
    UNSCHEDULED,
    Endpoint,
    EngineDeadError,
    EngineRequest,
    KVHandle,
    ResponseChunk,
    ResponseHead,
    ResponseItem,
    ResponseTail,
    request_key,
    tool_key,
)
from sluice.replica.config import EngineConfig
from sluice.replica.engine import (
    NOT_GIVEN,
    EngineInfo,
    Forward,
    check_resume,
    check_transfer,
    chunks_of,
    refuse_transfer_fields,
    table_capacity,
)
from sluice.replica.private_dir import private_dir
from sluice.replica.processes import bind_workers, on_cpu
from sluice.replica.profiling import latency_profile
from sluice.replica.scheduler.state_table import StateTable
from sluice.replica.scheduler.xargs import (
    BATCH_LOG,
    TABLE_FOLDER,
    RequestArgs,
    SchedulerSettings,
    rank_path,
    reserved_keys,
    to_xargs,
)
from sluice.replica.vllm.local_model import local_model
from sluice.replica.vllm.serving import (
    Serving,
    called_tools,
    event_bytes,
    is_plain,
    refused,
    stream_error,
    template_of,
    whole_response,
    with_upload,
)
from sluice.replica.vllm.setup import (
    Launched,
    client_error_types,
    engine_arguments,
    launch,
    prepare_environment,
)
from sluice.replica.vllm.warm_up import warm_up
from sluice.replica.vllm_args import devices, workers
from sluice.scheduling.fleet.ranks import rank_name
from sluice.scheduling.fleet.state import EngineState
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.preemption import TaskBounds
from sluice.scheduling.roles import Role
from sluice.telemetry.phases import phase

if TYPE_CHECKING:
    from sluice.replica.vllm.client import ApiCall


# A request of the API as vLLM's own request, with Sluice's arguments in it.


def parse(request: EngineRequest, serving: Serving, call: ApiCall, in_use: bool) -> Any:
    """The body as vLLM's request type; ``call`` gets what vLLM drops. Raises RequestError."""
    check_transfer(request)
    check_resume(request)
    body = dict(request.body)
    if request.prefill_only:
        body.pop("stream_options", None)
        body["stream"] = False
    if in_use:
        raise RequestError(f"request id {request.request_id!r} is in use", None, 409)
    extra = _extra_arguments(body)
    call.xargs = to_xargs(RequestArgs.of(request, call.received_s, call.ends))
    call.prefill_only, call.kv_of_request = request.prefill_only, request.kv_of_request
    call.transfer = _transfer(request)
    if request.endpoint in SPEECH:
        body = with_upload(body)
        call.in_turn = bool(body.get("stream"))
        call.cache_salt = body.pop("cache_salt", None)
    if serving.generates:
        body["vllm_xargs"] = {**extra, **call.xargs}
    if request.endpoint not in UNSCHEDULED:
        prefix = "resp_" if request.endpoint == "responses" else ""
        resume = request.resume
        body["request_id"] = prefix + (resume.response_id if resume else request.request_id)
    return validated(body, serving)


def _extra_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """The client's extra engine arguments. Raises RequestError: they are not allowed."""
    if body.get("use_beam_search"):
        raise RequestError("Beam search is not supported.", "use_beam_search")
    extra = body.get("vllm_xargs")
    if extra is not None and not isinstance(extra, dict):
        raise RequestError("vllm_xargs must be an object.", "vllm_xargs")
    refuse_transfer_fields(extra or {})
    reserved = reserved_keys(extra)
    if reserved:
        raise RequestError(
            f"vllm_xargs holds keys that are reserved: {', '.join(reserved)}.", "vllm_xargs"
        )
    return extra or {}


def _transfer(request: EngineRequest) -> dict[str, Any] | None:
    if request.kv_handle is not None:
        return {**request.kv_handle.params, "do_remote_prefill": True, "do_remote_decode": False}
    if request.prefill_only:
        given = {"cached_only": True} if request.cached_only else {}
        return {"do_remote_prefill": False, "do_remote_decode": True, **given}
    return None


def validated(body: dict[str, Any], serving: Serving) -> Any:
    """The body in vLLM's type. Raises RequestError: vLLM refuses it."""
    try:
        return serving.body.validate_python(body)
    except ValidationError as error:
        field, message = _fault(error, body)
        raise RequestError(f"{field}: {message}" if field else message, field) from error
    except client_error_types() as error:
        name = getattr(error, "parameter", None) or _malformed(body, serving.body._type)
        raise RequestError(str(error), name) from error
    except (AttributeError, KeyError, TypeError) as error:
        # vLLM's own checks run on the raw body and fail on values of a wrong type.
        name = _malformed(body, serving.body._type)
        raise RequestError(f"{name or 'The body'} is malformed: {error}", name) from error


def _malformed(body: dict[str, Any], request_type: Any) -> str | None:
    """The first field whose value vLLM refuses by itself."""
    for part in get_args(request_type):
        if (found := _malformed(body, part)) is not None:
            return found
    names: Iterable[str] = getattr(request_type, "model_fields", ())
    for name in names:
        if name in body:
            try:
                _adapter(request_type, name).validate_python(body[name])
            except Exception:
                return name
    return None


@cache
def _adapter(request_type: Any, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(request_type.model_fields[name].annotation)


def _fault(error: ValidationError, body: dict[str, Any]) -> tuple[str | None, str]:
    """The field at fault, and what is wrong with it. A body of several forms has faults of each:
    those of the form with the fewest count."""
    faults = error.errors(include_url=False, include_context=False)
    heads = [fault["loc"][0] if fault["loc"] else "" for fault in faults]
    forms = ["" if head in body else head for head in heads]
    fault = faults[forms.index(min(forms, key=forms.count))]
    path: list[str] = []
    value: Any = body
    for part in fault["loc"]:
        fields = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(fields, dict) and part in fields:
            # Other parts name a form, or a function of vLLM's.
            path.append(str(part))
            value = fields[part]
    if fault["type"] == "missing":
        path.append(str(fault["loc"][-1]))
    return ".".join(path) or None, fault["msg"].removeprefix("Value error, ")


logger = logging.getLogger(__name__)

_numbers = itertools.count()

_NOT_STARTED = "the vLLM engine is not running"

_IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


class VllmEngine:
    """The engine with vLLM. ``cpu_core``: to pin it to, with ``config.pin_cpu`` on CPUs;
    ``traced``: keep times for spans. Raises ValueError: an argument is unknown or only for Sluice.
    """

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        max_live_requests: int,
        cpu_core: int | None = None,
        traced: bool = False,
        role: Role = "mixed",
    ) -> None:
        self._config = config
        self._role = role
        self._replica_id = replica_id
        self._cpu_core = cpu_core if config.pin_cpu else None
        self._traced = traced
        self._max_live_requests = max_live_requests
        self._table_capacity = table_capacity(max_live_requests)
        self._table = StateTable.create(self._table_capacity)
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._servings: dict[Endpoint, Serving] = {}
        self._models: Any = None
        self._adapters: Any = None
        self._reasoning_ends: frozenset[int] = frozenset()
        self._rank = 0
        self._others: list[VllmEngine] = []
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> EngineInfo:
        """Load the model, use every feature once, and measure the step time if no profile is known.

        Raises ValueError: an argument or the explicit latency profile is wrong. Raises OSError: the
        profile cannot be read. Raises RuntimeError: the engine did not start. Raises
        EngineDeadError: it died at the first use of a feature."""
        config = self._config
        explicit = None
        if config.latency_profile is not None:
            text = config.latency_profile.expanduser().read_text(encoding="utf-8")
            explicit = LatencyProfile.from_json(text)
        if config.model == "local":
            model = str(await asyncio.to_thread(local_model, config.cache_dir))
        else:
            model = config.model
        name = config.served_name
        started_s = time.monotonic()
        launched = await self._launch(model)
        self._llm = launched.llm
        self._servings = launched.servings
        self._models = launched.models
        self._reasoning_ends = reasoning_ends(launched.llm)
        logger.info("vLLM engine of %s started in %.1f s", model, time.monotonic() - started_s)
        with phase("replica: first use of features"):
            await warm_up(self, name, config.adapters)
        self._table.clear_samples()
        with phase("replica: latency profile"):
            self._info = await self._describe(name, explicit)
        if config.adapters_dir is not None:
            from sluice.replica.vllm.adapters import directory_adapters

            self._adapters = directory_adapters(config, self._llm, self._models)
            await self._adapters.start()
        return self._info

    async def _launch(self, model: str) -> Launched:
        config = self._config
        log = config.batch_log
        with phase("replica: import vLLM"):
            prepare_environment(model, config.pin_cpu, config.preemption)
        if config.pin_cpu and workers(config.vllm_args) > 1:
            bind_workers(devices(config.vllm_args), self._cpu_core)
        # Once both processes have mapped the table its file is deleted, so none can be left behind.
        with private_dir(_IN_MEMORY) as directory:
            path = directory / "state"
            number = next(_numbers)
            table_folder, batch_log = f"{TABLE_FOLDER}_{number}", f"{BATCH_LOG}_{number}"
            os.environ[table_folder] = str(directory)
            if log is not None:
                os.environ[batch_log] = str(log / self._replica_id)
            for each in (self, *self._others):
                own = rank_path(path, each._rank)
                each._table = StateTable.create(self._table_capacity, own)
                each._table.set_role(each._role)
            settings = SchedulerSettings(
                state_table=Path(f"${table_folder}", path.name),
                policy=config.policy,
                policy_options=config.policy_options,
                role=self._role,
                best_effort=config.best_effort,
                preemption=TaskBounds() if config.preemption else None,
                batch_log=None if log is None else Path(f"${batch_log}.jsonl"),
                cpu_core=self._cpu_core if on_cpu() else None,
            )
            with phase("replica: check the arguments"):
                arguments = engine_arguments(config, model, settings, self._role, self._traced)
            return await launch(arguments, config.grammar_check_s)

    async def _describe(self, name: str, explicit: LatencyProfile | None) -> EngineInfo:
        vllm_config = self._llm.vllm_config
        profile = explicit or await latency_profile(self._llm, self._table, self._config)
        self._table.set_model(profile.model.with_headroom(self._config.headroom))
        settings = SchedulerSettings.from_additional_config(vllm_config.additional_config)
        return EngineInfo(
            model=name,
            policy=self._config.policy,
            max_model_tokens=vllm_config.model_config.max_model_len,
            max_batch_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_sequences=vllm_config.scheduler_config.max_num_seqs,
            kv_blocks=vllm_config.cache_config.num_gpu_blocks,
            block_tokens=vllm_config.cache_config.block_size,
            profile=profile,
            preempts=self._config.preemption,
            policy_options=settings.make_policy().options.model_dump(mode="json"),
        )

    def set_role(self, role: Role) -> None:
        """See :meth:`sluice.replica.engine.Engine.set_role`."""
        self._table.set_role(role)

    async def generate(
        self, request: EngineRequest, forward: Forward | None = None
    ) -> AsyncIterator[ResponseItem]:
        """Serve one request; a refusal has a tail, an aborted request none. The head waits for the
        first piece: if the engine dies before it, another replica can serve the request."""
        if self._llm is None:
            raise EngineDeadError(_NOT_STARTED)
        from sluice.replica.vllm.client import ApiCall

        # Of a request of stages, one of which ends with the reasoning.
        thinks = any(not stage.tokens for stage in request.slo.stages[:-1])
        call = ApiCall(
            time.monotonic(),
            trace=request.trace,
            resumable=request.resumable,
            resume=request.resume,
            staged=bool(request.slo.stages),
            ends=self._reasoning_ends if thinks else frozenset(),
            rank=self._rank,
        )
        try:
            serving = self._serving_of(request.endpoint)
            if request.cached_only and not self._llm.gives_cached:
                raise RequestError(NOT_GIVEN, None, UNABLE)
            await self._llm.check_tags(request.body)
            if self._adapters is not None:
                call.adapter = await self._adapters.ensure(request.body.get("model"))
            body = parse(request, serving, call, request.request_id in self._llm.calls)
        except RequestError as error:
            for item in _refusal(error, request.endpoint):
                yield item
            return
        if call.resume is None and not call.staged and is_plain(request.endpoint, serving, body):
            call.forward = forward
        self._llm.calls[request.request_id] = call
        self._live += 1
        self._idle.clear()
        pieces = self._respond(request.endpoint, serving, body, call)
        ended = False
        session = 0 if request.turn is None or request.prefill_only else request.turn.session
        called: set[str] = set()
        try:
            async for item in pieces:
                if session and isinstance(item, ResponseChunk):
                    called.update(called_tools(item.data))
                elif request.promised and isinstance(item, ResponseTail):
                    key = request_key(request.request_id)
                    item = item._replace(late_parts=self._table.late_parts(key))
                yield item
            ended = True
            if session:
                self._table.add_call(session, tool_key(called) if called else 0)
        finally:
            await self._leave(request.request_id, call, pieces, ended)

    def _serving_of(self, endpoint: Endpoint) -> Serving:
        """The serving layer of ``endpoint``. Raises RequestError: the model does not offer it."""
        serving = self._servings.get(endpoint)
        if serving is None:
            offered = ", ".join(sorted(self._servings))
            raise RequestError(
                f"The model {self._config.served_name!r} does not offer {endpoint}; it offers "
                f"{offered}.",
                "model",
                404,
                "endpoint_not_offered",
            )
        return serving

    async def _respond(
        self, endpoint: Endpoint, serving: Serving, body: Any, call: ApiCall
    ) -> AsyncIterator[ResponseItem]:
        from sluice.replica.vllm.client import CURRENT_CALL

        CURRENT_CALL.set(call)
        response = await self._create(serving.layer, serving.create(body, None), call)
        error = call.refusal  # vLLM's own message would be that of an internal error
        if error is None and not (call.prefill_only and call.offer is not None):
            failed = getattr(response, "error", None)
            error = None if failed is None else refused(failed)
        rest: list[ResponseItem] = []
        if error is not None:
            rest = list(_refusal(error, endpoint))
        elif call.prefill_only:
            # The serving layer's own response is not used.
            given = call.offer or {}
            tokens = given.get("prompt_tokens", call.prompt_tokens)
            handle = KVHandle(self._replica_id, given, tokens)
            tail = ResponseTail(
                call.prompt_tokens, 0, (), call.queued_s, handle, call.cached_tokens
            )
            rest = [ResponseHead(200, "application/json"), tail]
        else:
            if hasattr(response, "__aiter__"):
                async for item in self._stream(endpoint, body, response, call):
                    yield item
            elif not call.aborted:
                # In a thread, as one with many numbers takes a while.
                media_type, data = await asyncio.to_thread(whole_response, endpoint, body, response)
                rest = [ResponseHead(200, media_type), *chunks_of(data, call.unsent_tokens)]
            rest.append(
                ResponseTail(
                    call.prompt_tokens,
                    call.output_tokens,
                    tuple(call.offsets_s),
                    call.queued_s,
                    cached_tokens=call.cached_tokens,
                    reasoned=call.reasoned if call.offsets_s else 0,
                )
            )
        for item in rest:
            if call.aborted:
                return
            yield item

    async def _create(self, serving: Any, creation: Any, call: ApiCall) -> Any:
        """vLLM's response, or its error response. Raises EngineDeadError: the engine died. Raises
        CancelledError: this task was cancelled; vLLM turns that into an error response."""
        try:
            response = await creation
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if call.prefill_only and call.offer is not None:
                # The layer needs more output than a prefill has; the prompt's KV is computed.
                return None
            self._raise_if_dead(error)
            response = serving.create_error_response(error)
            if int(response.error.code) >= 500:
                logger.exception("a request failed in vLLM")
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        if call.failure is not None:
            self._raise_if_dead(call.failure)
        return response

    async def _stream(
        self, endpoint: Endpoint, body: Any, response: Any, call: ApiCall
    ) -> AsyncIterator[ResponseItem]:
        """vLLM's server-sent events. They begin before the engine is asked, so a response whose
        constraint may be refused waits for it. A refusal in place of the first has its status."""
        begun = False
        constrained = any(getattr(body, n, None) for n in ("text", "structured_outputs", "tools"))
        early: list[Any] = []
        try:
            async for event in response:
                if call.failure is not None:
                    # What follows is vLLM's own description of the failure.
                    self._raise_if_dead(call.failure)
                if not begun:
                    refusal = call.refusal or stream_error(event)
                    if refusal is not None:
                        for item in _refusal(refusal, endpoint)[:2]:
                            yield item
                        return
                    early.append(event)
                    if constrained and not call.engine_ids:
                        continue
                    begun = True
                    yield ResponseHead(200, EVENT_STREAM)
                for each in early or (event,):
                    data = event_bytes(each, endpoint)
                    if call.forward is not None and call.template is None:
                        call.template = template_of(data)
                    for chunk in call.chunks(data):
                        yield chunk
                early.clear()
        except RequestError:
            if begun or call.refusal is None:
                raise
            for item in _refusal(call.refusal, endpoint)[:2]:
                yield item
        finally:
            await response.aclose()

    def _raise_if_dead(self, error: BaseException) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

        if self._llm is None:
            raise EngineDeadError("the vLLM engine was stopped") from error
        if isinstance(error, VllmEngineDeadError) or self._llm.errored:
            raise EngineDeadError(f"the vLLM engine died: {error}") from error

    async def _leave(self, request_id: str, call: ApiCall, pieces: Any, ended: bool) -> None:
        """Close the stream of a call, and abort it in the engine unless it has ended."""
        try:
            await pieces.aclose()
            if not ended and call.engine_ids and self._llm is not None and not self._llm.errored:
                await self._llm.abort(call.engine_ids)
        finally:
            call.forward = None  # or the response and its task would refer to each other
            if self._llm is not None:
                self._llm.calls.pop(request_id, None)
            self._live -= 1
            if not self._live:
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        """Stop a request; its response ends without a tail. Unknown ids are ignored."""
        call = self._llm.calls.get(request_id) if self._llm is not None else None
        if call is not None:
            call.aborted = True
            if call.engine_ids:
                await self._llm.abort(call.engine_ids)

    def state(self) -> EngineState:
        """The scheduler's state as of its last step."""
        return self._table.read()

    def waits_since_s(self) -> float | None:
        """When the request that has waited longest for its next output began to wait."""
        if self._llm is None:
            return None
        own = (since_s for (rank, _), since_s in self._llm.waits.items() if rank == self._rank)
        return min(own, default=None)

    async def pulse(self) -> None:
        """Return when the engine's process answers. Raises EngineDeadError: it is not running."""
        if self._llm is None:
            raise EngineDeadError(_NOT_STARTED)
        # Only the loop that runs the steps answers this call.
        await self._llm.is_sleeping()

    async def models(self) -> dict[str, Any]:
        """See :meth:`sluice.replica.engine.Engine.models`."""
        if self._models is None:
            raise EngineDeadError(_NOT_STARTED)
        listing = await self._models.show_available_models()
        body = {**listing.model_dump(mode="json"), "endpoints": sorted(self._servings)}
        if self._adapters is not None:
            body["digests"] = self._adapters.digests
        return body

    async def check_health(self) -> None:
        """Return if the engine is alive. Raises EngineDeadError: it died."""
        llm = self._llm
        if llm is None:
            raise EngineDeadError(_NOT_STARTED)
        if llm.errored:
            raise EngineDeadError("the vLLM engine died; its log says why")

    async def drain(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Stop the engine process; live requests end with an error. Idempotent."""
        llm, self._llm = self._llm, None
        if self._adapters is not None:
            self._adapters.stop()
        if llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

            # vLLM's own shutdown does not wake the tasks that wait for an output.
            llm.output_processor.propagate_error(VllmEngineDeadError())
            if llm.grammars is not None:
                llm.grammars.stop()
            # In this thread, though it takes seconds: beside a running event loop vLLM would take
            # its own shutdown for the engine's death, and log it as such.
            llm.shutdown()


def _refusal(error: RequestError, endpoint: Endpoint) -> tuple[ResponseItem, ...]:
    return (
        ResponseHead(error.status, "application/json"),
        ResponseChunk(error.body(endpoint)),
        ResponseTail(0, 0),
    )


class VllmRank(VllmEngine):
    """Rank ``rank``, at least 1, of the engine ``first``, which launches vLLM for all and is
    started before and stopped after it. Requests name a rank, so vLLM's balancing is not used."""

    def __init__(self, first: VllmEngine, rank: int) -> None:
        super().__init__(
            first._config,
            rank_name(first._replica_id, rank),
            first._max_live_requests,
            traced=first._traced,
            role=first._role,
        )
        self._rank = rank
        self._first = first
        first._others.append(self)

    async def start(self) -> EngineInfo:
        """Use every feature once on this rank. Raises EngineDeadError: an engine is not running."""
        first, config = self._first, self._config
        if first._llm is None or first._info is None:
            raise EngineDeadError("the first rank of the vLLM engine is not running")
        self._llm, self._info = first._llm, first._info
        self._servings, self._models = first._servings, first._models
        self._reasoning_ends = first._reasoning_ends
        await warm_up(self, config.served_name, config.adapters)
        self._table.clear_samples()
        self._table.set_model(self._info.profile.model.with_headroom(config.headroom))
        return self._info

    async def stop(self) -> None:
        """Serve no more requests; the first rank ends those that are live. Idempotent."""
        self._llm = None


def reasoning_ends(llm: Any) -> frozenset[int]:
    """Ids of the tokens that end reasoning; none if its parser does not detect it by a token."""
    name = llm.vllm_config.structured_outputs_config.reasoning_parser
    if not name:
        return frozenset()
    from vllm.reasoning import ReasoningParserManager

    parser = ReasoningParserManager.get_reasoning_parser(name)(llm.get_tokenizer())
    found = getattr(parser, "reasoning_end_token_ids", None) or [
        getattr(parser, "end_token_id", None)
    ]
    return frozenset(token for token in found if token is not None)
