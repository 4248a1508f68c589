"""vLLM's asynchronous engine client, which vLLM's OpenAI layer uses, with records per API call:
which output tokens passed, and when."""

# vLLM's classes are untyped here, so their subclasses are, too.
# mypy: disable-error-code="misc"

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tokenizers.decoders import DecodeStream
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.metrics.stats import IterationStats

from sluice.protocol.errors import RequestError
from sluice.protocol.requests import ResponseChunk, Resume
from sluice.replica.engine import Forward
from sluice.replica.grammar.backends import constrain, use
from sluice.replica.grammar.bound import TOO_COSTLY
from sluice.replica.grammar.check import GrammarCheck, structural_tags
from sluice.replica.processes import on_cpu
from sluice.replica.scheduler.local_scheduler import end_among
from sluice.replica.scheduler.xargs import ID, KEY_PREFIX, from_xargs, to_xargs

# Resuming in vLLM a stream that another replica began.
#
# vLLM's OpenAI layer serves the original body. The tokens that the client has received go through
# vLLM's output processor again, in the same steps as before. This restores the state of text, stop
# strings and the layer's parsers, and makes the same events. The engine itself gets the prompt
# followed by those tokens and computes the rest.

logger = logging.getLogger(__name__)

encode_text = msgspec.json.Encoder().encode

AT_ONCE = 32  # Outputs that are repeated before the event loop gets a turn: some milliseconds

MAX_PROMPT_LOGPROBS = 32_768
"""In one response; vLLM makes them one by one on the replica's event loop."""

_ZERO = ("presence_penalty", "frequency_penalty", "bad_words")
_UNSET = (
    "structured_outputs",
    "thinking_token_budget",
    "repetition_detection",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
)
"""Sampling parameters that depend on which tokens are output (resumed tokens would count as
prompt), or that ask for more than the id of an output token."""
_TRANSFER = ("kv_transfer_params", "ec_transfer_params")


def is_resumable(params: Any) -> bool:
    """Whether another engine could resume an output with these parameters. It is as valid as the
    original, and identical only at temperature 0: the random numbers' state is lost."""
    own = (key.startswith(KEY_PREFIX) or key in _TRANSFER for key in params.extra_args or ())
    return (
        params.n == 1
        and not any(getattr(params, name, None) for name in _ZERO)
        and all(getattr(params, name, None) is None for name in _UNSET)
        and all(own)
    )


async def repeat(
    processor: Any, request: Any, queue: Any, resume: Resume, max_model_tokens: int
) -> list[Any]:
    """Repeat the outputs in ``resume``, yielding to the event loop in between. If they are the
    whole output, or the request was aborted, ``processor`` has forgotten it afterwards."""
    outputs: list[Any] = []
    end = 0
    for number, tokens in enumerate(filter(None, resume.chunks), 1):
        start, end = end, end + tokens
        output = EngineCoreOutput(request.request_id, list(resume.token_ids[start:end]))
        stats = None
        if end == len(resume.token_ids):
            output.finish_reason, output.stop_reason = _end_of(
                request, resume.token_ids, max_model_tokens
            )
        state = processor.request_states[request.request_id]
        if output.finish_reason is not None and state.stats is not None:
            stats = IterationStats()
        processor.process_outputs([output], time.monotonic(), stats)
        made = queue.get_nowait()
        if made is not None:
            outputs.append(made)
        if request.request_id not in processor.request_states:
            return outputs
        # Its prompt is still to be computed.
        state.is_prefilling = True
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
            if request.request_id not in processor.request_states:
                return outputs
    return outputs


def rest_of(request: Any, token_ids: Sequence[int], prefill_only: bool) -> Any:
    """The request for an engine that resumes after ``token_ids``."""
    rest, params = copy(request), copy(request.sampling_params)
    rest.prompt_token_ids = [*request.prompt_token_ids, *token_ids]
    if not prefill_only:
        params.max_tokens -= len(token_ids)
        params.min_tokens = max(0, params.min_tokens - len(token_ids))
    rest.sampling_params = params
    return rest


def _end_of(
    request: Any, token_ids: Sequence[int], max_model_tokens: int
) -> tuple[FinishReason | None, int | None]:
    """Why the output ended with these tokens, as vLLM's scheduler decides it (no stop strings)."""
    params, last = request.sampling_params, token_ids[-1]
    if last == params.eos_token_id:
        return FinishReason.STOP, None
    if last in (params.stop_token_ids or ()):
        return FinishReason.STOP, last
    tokens = len(request.prompt_token_ids) + len(token_ids)
    if len(token_ids) >= params.max_tokens or tokens >= max_model_tokens:
        return FinishReason.LENGTH, None
    return None, None


CURRENT_CALL: ContextVar[ApiCall | None] = ContextVar("CURRENT_CALL", default=None)
"""The API call that this task serves, for places where vLLM's requests do not carry it."""


class AbortedError(ValueError):
    """The request was aborted before it reached the engine."""


@dataclass(slots=True)
class ApiCall:
    """One API call in progress; times in seconds, offsets after ``received_s``. Only tokens of the
    first prompt's first choice are tracked one by one; with ``in_turn`` those of all, as parts of
    one stream.

    ``engine_ids``: one per prompt. ``unsent_tokens``, ``unsent_groups``: in no response chunk yet,
    the groups being ids by engine output, each with its offset or 0. ``failure``: not a client's
    mistake. ``refusal``: of its grammar. ``prefill_only``: at most one token, which is dropped.
    ``kv_of_request``: the call that is stopped for it. ``offer``: of the KV that the engine keeps.
    ``resumable``, ``staged``: chunks carry token ids, or times. ``resume``: the part that its
    client has, ``repeated``: its outputs. ``reasoned``: the token that ended the reasoning, from 1,
    ``unsent_reasoned`` from the first unsent one; 0: none. ``adapter``: vLLM's number of the
    directory's adapter; 0: none. ``wait``: its key among ``waits``. ``forward``: takes chunks at
    once, ``template``: with this around their text, once it is known; ``forwarded``: ids of the
    tokens that vLLM's layer has not seen yet."""

    received_s: float
    engine_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    unsent_tokens: int = 0
    offsets_s: list[float] = field(default_factory=list)
    failure: BaseException | None = None
    refusal: RequestError | None = None
    aborted: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    xargs: Mapping[str, str] = field(default_factory=dict)
    transfer: Mapping[str, Any] | None = None
    prefill_only: bool = False
    kv_of_request: str = ""
    offer: Mapping[str, Any] | None = None
    stats: Any = None
    resumable: bool = False
    staged: bool = False
    unsent_groups: list[tuple[tuple[int, ...], float]] = field(default_factory=list)
    resume: Resume | None = None
    repeated: list[Any] = field(default_factory=list)
    prompt_logprobs: int = 0
    ends: frozenset[int] = frozenset()
    reasoned: int = 0
    unsent_reasoned: int = 0
    in_turn: bool = False
    cache_salt: str | None = None
    adapter: int = 0
    rank: int = 0
    wait: tuple[int, int] = (0, 0)
    forward: Forward | None = None
    template: tuple[bytes, bytes] | None = None
    forwarded: list[int] = field(default_factory=list)

    def relay(self, text: str, token_ids: Sequence[int]) -> bool:
        """Send tokens, neither the first nor the last, past vLLM's layer; false: not possible.
        The layer gets their ids with the next output that it sees, to count them."""
        if self.template is None or self.forward is None or self.unsent_tokens:
            return False
        before, after = self.template
        ids = tuple(token_ids) if self.resumable else ()
        if not self.forward(ResponseChunk(before + encode_text(text) + after, len(token_ids), ids)):
            return False
        self.forwarded += token_ids
        self.output_tokens += len(token_ids)
        return True

    def count(
        self, output: Any, counted: dict[int, int], plain: bool = False, first: bool = True
    ) -> None:
        """Record an output of its ``first`` prompt, or of another. ``counted``: the earlier tokens
        of its request, by choice; ``plain``: outputs are cumulative."""
        if not counted:
            self.prompt_tokens += len(output.prompt_token_ids or ())
            self.cached_tokens += output.num_cached_tokens or 0
            if first and self.stats is None:
                self.stats = output.metrics
        if first and output.kv_transfer_params:
            self.offer = output.kv_transfer_params
        for choice in output.outputs:
            before = counted.get(choice.index, 0)
            # Cumulative outputs repeat the earlier tokens, deltas do not.
            new = len(choice.token_ids) - (before if plain else 0)
            counted[choice.index] = before + new
            self.output_tokens += new
            if not first or choice.index:
                continue
            if self.ends and not self.reasoned:
                ended = end_among(choice.token_ids[before if plain else 0 :], self.ends)
                if ended:
                    self.reasoned = before + ended
                    self.unsent_reasoned = self.unsent_tokens + ended
            self.unsent_tokens += new
            if plain:
                self.offsets_s += [time.monotonic() - self.received_s] * new
            elif new and (self.resumable or self.staged):
                offset_s = time.monotonic() - self.received_s if self.staged else 0.0
                self.unsent_groups.append((tuple(choice.token_ids), offset_s))

    def chunks(self, event: bytes) -> list[ResponseChunk]:
        """``event`` with the tokens since the last one. If chunks carry ids or times, each engine
        output is one: another engine repeats these steps, and a stage may end without an event."""
        tokens, self.unsent_tokens = self.unsent_tokens, 0
        groups, self.unsent_groups = self.unsent_groups, []
        reasoned, self.unsent_reasoned = self.unsent_reasoned, 0
        if not groups:
            return [ResponseChunk(event, tokens, reasoned=reasoned)]
        chunks = []
        for place, (group, offset_s) in enumerate(groups, 1):
            own = reasoned if 0 < reasoned <= len(group) else 0
            data = event if place == len(groups) else b""
            ids = group if self.resumable else ()
            chunks.append(ResponseChunk(data, len(group), ids, own, offset_s))
            reasoned -= len(group)
        return chunks

    @property
    def queued_s(self) -> float | None:
        """Seconds from ``received_s`` to its first batch, if vLLM reports it."""
        scheduled_s = getattr(self.stats, "scheduled_ts", 0.0)
        return max(0.0, scheduled_s - self.received_s) if scheduled_s else None


class RelayedState(RequestState):
    """A request in vLLM whose tokens go to the client at once while its generator waits for the
    next output. A task that wakes for each token, and vLLM's objects for it, cost more than all
    else that happens to it in this process."""

    call: ApiCall
    waits: dict[tuple[int, int], float]

    @classmethod
    def relay(cls, state: Any, call: ApiCall, waits: dict[tuple[int, int], float]) -> None:
        """Have vLLM's ``state`` of a request do so, unless vLLM gathers several tokens first."""
        if state.stream_interval == 1:
            state.__class__, state.call, state.waits = cls, call, waits

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Called by vLLM in the task that handles the outputs of all requests: what fails here
        fails this request alone."""
        call, text = self.call, None
        key = call.wait
        try:
            if key in self.waits and finish_reason is None and self.queue.output is None:
                text = self.detokenizer.get_next_output_text(False, True)
                if call.relay(text, new_token_ids):
                    self.waits[key] = time.monotonic()
                    return None
        except Exception as error:
            logger.exception("an output cannot be sent")
            self.queue.put(error)
            return None
        output = super().make_request_output(
            new_token_ids, pooling_output, finish_reason, *more, **named
        )
        if text is not None:
            output.outputs[0].text = text  # vLLM gives it once
        return output


_PRECEDING = 32
"""Tokens of a prompt, its last ones, that decide how the first token after them is written."""


def prime(detokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
    """Have the end of a prompt alone precede the output's text. vLLM decodes all of it with the
    first token, in the task that handles the outputs of all requests."""
    last = list(prompt_token_ids[-_PRECEDING:])
    skip = detokenizer.skip_special_tokens
    text = detokenizer.tokenizer.decode(last, skip_special_tokens=skip)
    # Of a character that is cut apart, or of special tokens alone, more may count.
    if text and "\ufffd" not in text:
        detokenizer.stream = DecodeStream(ids=last, skip_special_tokens=skip)


class WatchedLLM(AsyncLLM):
    """``AsyncLLM`` that keeps an ``ApiCall`` record of each live call, by id in the fleet.

    ``waits``: since when each engine request waits for its next output, monotonic seconds; those
    with a slow consumer do not count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: dict[str, ApiCall] = {}
        self.grammars: GrammarCheck | None = None
        self.waits: dict[tuple[int, int], float] = {}
        super().__init__(*args, **kwargs)
        # vLLM would check constraints again, with a backend that it chooses by other rules.
        self.input_processor.structured_outputs_config = None
        transfer = self.vllm_config.kv_transfer_config
        self.gives_cached = transfer is not None and transfer.kv_connector == "TcpConnector"
        """Whether another engine can have a part of a prompt's KV from it."""

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """As ``AsyncLLM.generate``, with a record. The engine is asked for a plain response step by
        step, to know its tokens' times; the consumer still gets it in one piece."""
        call = self.calls.get((sampling_params.extra_args or {}).get(ID, ""))
        current = CURRENT_CALL.get()
        if call is None and current is not None and sampling_params.extra_args is None:
            # vLLM asks for the language of audio before it transcribes it.
            sampling_params.extra_args = dict(current.xargs)
        plain = sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        if sampling_params.structured_outputs is not None:
            await self._check_grammar(call, sampling_params)
        if call is not None:
            if call.aborted:
                raise AbortedError("the request was aborted")
            self._check_prompt_logprobs(call, prompt, sampling_params)
            if call.resume is not None:
                # The id of its first attempt: this engine may still have a request with that id.
                request_id = f"{request_id}.{call.xargs[ID]}"
            if call.in_turn and call.engine_ids:
                sampling_params = _later_part(sampling_params)
            if call.cache_salt is not None:
                prompt = {**prompt, "cache_salt": call.cache_salt}
            call.engine_ids.append(request_id)
            call.resumable = call.resumable and is_resumable(sampling_params)
            if call.trace and self.observability_config.otlp_traces_endpoint is not None:
                kwargs["trace_headers"] = call.trace
            if plain:
                sampling_params = copy(sampling_params)
                sampling_params.output_kind = RequestOutputKind.CUMULATIVE
            if call.transfer is not None:
                sampling_params = _with_transfer(sampling_params, call)
        source = super().generate(prompt, sampling_params, request_id, *args, **kwargs)
        first = call is not None and (call.in_turn or len(call.engine_ids) == 1)
        watched = source if call is None else _watch(source, call, plain, first)
        async with aclosing(self._timed(source, watched, call)) as outputs:
            async for output in outputs:
                yield output

    def _check_prompt_logprobs(self, call: ApiCall, prompt: Any, params: Any) -> None:
        """Raises ValueError: a call's prompts together ask for too many log probabilities."""
        each = params.prompt_logprobs
        if each is None:
            return
        if self.vllm_config.lora_config is not None and on_cpu():
            # There LoRA layers expect logits of sampled tokens alone: others end the engine.
            raise ValueError(
                "prompt_logprobs, and logprobs with echo, are not available from an engine that "
                "serves LoRA adapters on CPUs."
            )
        if each < 0:
            each = self.vllm_config.model_config.get_vocab_size()
        tokens = len(prompt["prompt_token_ids"])
        call.prompt_logprobs += (each + 1) * tokens * params.n
        if call.prompt_logprobs > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"prompt_logprobs: {each + 1} log probabilities for each of {tokens} prompt tokens "
                f"and {params.n} choices bring this request to {call.prompt_logprobs}; allowed are "
                f"{MAX_PROMPT_LOGPROBS}. Ask for fewer, or send a shorter prompt."
            )

    async def check_tags(self, body: Mapping[str, Any]) -> None:
        """Raises RequestError: vLLM must not parse these structural tags, on the event loop."""
        if self.grammars is None:
            return
        for tag in structural_tags(body):
            await self.grammars.check(StructuredOutputsParams(structural_tag=tag), frozenset())

    async def _check_grammar(self, call: ApiCall | None, sampling_params: Any) -> None:
        """Choose the backend of a request's grammar. Raises RequestError: it is refused."""
        params = sampling_params.structured_outputs
        if call is not None and call.prefill_only:
            return
        try:
            if self.grammars is None:
                self._constrain(sampling_params)
            else:
                stops = frozenset(sampling_params.all_stop_token_ids or ())
                use(params, await self.grammars.check(params, stops))
        except RequestError as error:
            if call is not None:
                call.refusal = error
            raise

    def _constrain(self, sampling_params: Any) -> None:
        """Check in this process without limits. Raises RequestError: the grammar is refused."""
        try:
            constrain(sampling_params, self.vllm_config, self.get_tokenizer())
        except Exception as error:  # of many types, by the backend
            raise RequestError(
                f"The grammar or schema of this request is malformed: {error}.", None
            ) from error

    async def _add_request(
        self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any
    ) -> None:
        """Resumed streams start after the sent part; with data parallelism, to the call's rank."""
        params = request.sampling_params
        call = self.calls.get(((params and params.extra_args) or {}).get(ID, ""))
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            current = call or CURRENT_CALL.get()
            request.data_parallel_rank = 0 if current is None else current.rank
        if call is None or call.resume is None or not call.resume.token_ids:
            await super()._add_request(request, prompt, parent_req, index, queue)
            state = self.output_processor.request_states.get(request.request_id)
            if call is not None and call.forward is not None and parent_req is None and state:
                RelayedState.relay(state, call, self.waits)
                if isinstance(state.detokenizer, FastIncrementalDetokenizer) and (
                    not state.detokenizer.num_output_tokens()
                ):
                    prime(state.detokenizer, request.prompt_token_ids)
            return
        rest = rest_of(request, call.resume.token_ids, call.prefill_only)
        if call.prefill_only:
            # Not earlier, for other requests could take the blocks that become free.
            stopped = self.calls.get(call.kv_of_request)
            if stopped is not None:
                stopped.aborted = True
                await self.abort(stopped.engine_ids)
            await super()._add_request(rest, prompt, parent_req, index, queue)
            return
        processor = self.output_processor
        processor.add_request(request, prompt, parent_req, index, queue)
        most = self.vllm_config.model_config.max_model_len
        call.repeated = await repeat(processor, request, queue, call.resume, most)
        if request.request_id in processor.request_states:
            await self.engine_core.add_request_async(rest)
        elif queue.output is None:  # it has ended; the abort has notified the queue already
            queue.put(call.repeated.pop())

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """As ``AsyncLLM.encode``, and keeps the call's record. Its result counts as one output
        token; the result of the first input is timed."""
        call = CURRENT_CALL.get()
        if call is not None:
            if call.aborted:
                raise AbortedError("the request was aborted")
            call.engine_ids.append(request_id)
            # Shared by all prompts of a call.
            pooling_params = pooling_params.clone()
            pooling_params.extra_kwargs = {**(pooling_params.extra_kwargs or {}), **call.xargs}
        source = super().encode(prompt, pooling_params, request_id, *args, **kwargs)
        watched = (
            source if call is None else _watch_encoded(source, call, len(call.engine_ids) == 1)
        )
        async with aclosing(self._timed(source, watched, call)) as outputs:
            async for output in outputs:
                yield output

    async def _timed(
        self, source: Any, watched: Any, call: ApiCall | None
    ) -> AsyncGenerator[Any, None]:
        """Forward the outputs of ``watched``, which wraps ``source``; see :attr:`waits`."""
        key = 0 if call is None else call.rank, id(source)
        if call is not None:
            call.wait = key
        try:
            while True:
                self.waits[key] = time.monotonic()
                output = await anext(watched, None)
                del self.waits[key]
                if output is None:
                    return
                yield output
        finally:
            self.waits.pop(key, None)
            await watched.aclose()
            await source.aclose()


async def _watch(
    source: Any, call: ApiCall, plain: bool, first_prompt: bool
) -> AsyncGenerator[Any, None]:
    """Count and forward the outputs of one request; of a plain response only the last, whole."""
    counted: dict[int, int] = {}
    finished: dict[int, Any] = {}
    try:
        async for latest in source:
            _check_bound(latest, call)
            # The repeated outputs come before the first new one.
            repeated, call.repeated = call.repeated, []
            for number, output in enumerate((*repeated, latest), 1):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
                call.count(output, counted, plain, first_prompt)
                if call.forwarded:
                    output.outputs[0].token_ids = [*call.forwarded, *output.outputs[0].token_ids]
                    call.forwarded = []
                if not plain:
                    yield output
                    continue
                finished |= {c.index: c for c in output.outputs if c.finish_reason is not None}
                if output.finished:
                    output.outputs = [finished[index] for index in sorted(finished)]
                    yield output
    except Exception as error:
        call.failure = error
        raise


def _check_bound(output: Any, call: ApiCall) -> None:
    """Raises RequestError: the engine has stopped a request because of its grammar's time."""
    if any(choice.stop_reason == TOO_COSTLY for choice in output.outputs):
        call.refusal = RequestError(
            "The grammar or schema of this request is costly: the engine took too long to follow "
            "it, and stopped the request.",
            None,
        )
        raise call.refusal


def _later_part(sampling_params: Any) -> Any:
    """Parameters of a later part of a stream; its TTFT counts from the end of the one before."""
    now_s = time.monotonic()
    args = from_xargs(sampling_params.extra_args, "", now_s)
    slo = args.slo
    if slo.e2e_s is not None:
        left_s = max(0.001, slo.e2e_s - (now_s - args.arrival_s))
        slo = msgspec.structs.replace(slo, e2e_s=left_s)
    own = to_xargs(args._replace(arrival_s=now_s, waited_s=0.0, slo=slo))
    sampling_params = copy(sampling_params)  # the parts share it
    sampling_params.extra_args = {**sampling_params.extra_args, **own}
    return sampling_params


def _with_transfer(sampling_params: Any, call: ApiCall) -> Any:
    """The parameters of a request with a KV transfer from or to another engine."""
    sampling_params = copy(sampling_params)
    extra = sampling_params.extra_args or {}
    # A copy, as the engine changes it.
    sampling_params.extra_args = {**extra, "kv_transfer_params": dict(call.transfer or {})}
    if call.prefill_only:
        # Its token is dropped, so it must not be processed further.
        sampling_params.max_tokens = 1
        sampling_params.min_tokens = 0
        sampling_params.stop = []
        sampling_params.detokenize = False
        sampling_params.logprobs = None
        sampling_params.structured_outputs = None
    return sampling_params


async def _watch_encoded(source: Any, call: ApiCall, first: bool) -> AsyncGenerator[Any, None]:
    try:
        async for output in source:
            if output.finished:
                call.prompt_tokens += len(output.prompt_token_ids or ())
                call.cached_tokens += output.num_cached_tokens or 0
                call.output_tokens += 1
                if first:
                    call.offsets_s.append(time.monotonic() - call.received_s)
            yield output
    except Exception as error:
        call.failure = error
        raise
