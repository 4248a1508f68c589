"""A request of the API as vLLM's own request, with Sluice's arguments in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from pydantic import TypeAdapter, ValidationError

from sluice.replica.engine import SPEECH, UNSCHEDULED, EngineRequest
from sluice.replica.errors import RequestError
from sluice.replica.resume import check_resume
from sluice.replica.scheduler.xargs import RequestArgs, reserved_keys, to_xargs
from sluice.replica.transfer.requests import check_transfer, refuse_transfer_fields
from sluice.replica.vllm.serving import Serving, with_upload
from sluice.replica.vllm.setup import client_error_types

if TYPE_CHECKING:
    from sluice.replica.vllm.client import ApiCall


def parse(request: EngineRequest, serving: Serving, call: ApiCall, in_use: bool) -> Any:
    """The body as vLLM's own request type. What vLLM does not pass on is noted in ``call``.

    Args:
        serving: the serving layer of its endpoint.
        in_use: another request has its id.

    Raises:
        RequestError: the body is not allowed.
    """
    check_transfer(request)
    check_resume(request)
    body = dict(request.body)
    if request.prefill_only:
        body.pop("stream_options", None)
        body["stream"] = False
    if in_use:
        raise RequestError(f"request id {request.request_id!r} is in use", None, 409)
    extra = _extra_arguments(body)
    call.xargs = _arguments(request, call)
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
    return _validated(body, serving)


def _extra_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """The client's own extra arguments for the engine.

    Raises:
        RequestError: they, or the way to search, are not allowed.
    """
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


def _arguments(request: EngineRequest, call: ApiCall) -> dict[str, str | int | float]:
    """What the scheduler gets of the request."""
    return to_xargs(
        RequestArgs(
            request.request_id,
            call.received_s - request.waited_s,
            request.slo,
            request.best_effort,
            request.prefix,
            request.tenant,
            request.weight,
            request.promised,
            call.ends,
        )
    )


def _transfer(request: EngineRequest) -> dict[str, Any] | None:
    """vLLM's KV transfer parameters of a request."""
    if request.kv_handle is not None:
        return {**request.kv_handle.params, "do_remote_prefill": True, "do_remote_decode": False}
    if request.prefill_only:
        return {"do_remote_prefill": False, "do_remote_decode": True}
    return None


def _validated(body: dict[str, Any], serving: Serving) -> Any:
    """The body in vLLM's type.

    Raises:
        RequestError: vLLM refuses it.
    """
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
    """vLLM's type of a field by itself."""
    return TypeAdapter(request_type.model_fields[name].annotation)


def _fault(error: ValidationError, body: dict[str, Any]) -> tuple[str | None, str]:
    """The field at fault, in the client's terms, and what is wrong with it.

    Where a body may have several forms, vLLM's type names the faults of each: those of the form
    with the fewest count.
    """
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
