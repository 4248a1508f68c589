"""The messages of Envoy's external processing service that an endpoint picker needs.

Numbers are those of ``envoy.service.ext_proc.v3`` and ``envoy.config.core.v3`` (Envoy 1.40); other
fields are skipped. Decoded messages are checked."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

MAX_HEADERS: Final = 256
MAX_HEADER_BYTES: Final = 64 << 10  # of one message, names and values; Envoy sends up to 60 KiB
ENDPOINT_KEY: Final = "x-gateway-destination-endpoint"  # header and metadata of the pick
ENDPOINT_NAMESPACE: Final = "envoy.lb"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

STREAMED_BYTES: Final = 60 << 10  # of a body in one message: some proxies accept at most 64 KiB

Headers = Sequence[tuple[bytes, bytes]]  # header names in lower case, and values
_PACKAGE: Final = "sluice.ext_proc"
_FIELDS: Final = {
    "HeaderValue": "key=1:string value=2:string raw_value=3:bytes",
    "HeaderMap": "headers=1:HeaderValue*",
    "HttpHeaders": "headers=1:HeaderMap end_of_stream=3:bool",
    "HttpBody": "body=1:bytes end_of_stream=2:bool",
    "HttpTrailers": "",
    "Namespace": "key=1:string value=2:bytes",
    "Metadata": "filter_metadata=1:Namespace*",
    "ProtocolConfiguration": "request_body_mode=1:int32 response_body_mode=2:int32",
    "ProcessingRequest": "request_headers=2:HttpHeaders response_headers=3:HttpHeaders "
    "request_body=4:HttpBody response_body=5:HttpBody request_trailers=6:HttpTrailers "
    "response_trailers=7:HttpTrailers metadata_context=8:Metadata observability_mode=10:bool "
    "protocol_config=11:ProtocolConfiguration",
    "HeaderValueOption": "header=1:HeaderValue append_action=3:int32",
    "HeaderMutation": "set_headers=1:HeaderValueOption* remove_headers=2:string*",
    "StreamedBodyResponse": "body=1:bytes end_of_stream=2:bool",
    "BodyMutation": "clear_body=2:bool streamed_response=3:StreamedBodyResponse",
    "CommonResponse": "header_mutation=2:HeaderMutation body_mutation=3:BodyMutation",
    "PartResponse": "response=1:CommonResponse",
    "HttpStatus": "code=1:int32",
    "ImmediateResponse": "status=1:HttpStatus headers=2:HeaderMutation body=3:bytes "
    "details=5:string",
    "ProcessingResponse": "request_headers=1:PartResponse response_headers=2:PartResponse "
    "request_body=3:PartResponse response_body=4:PartResponse request_trailers=5:PartResponse "
    "response_trailers=6:PartResponse immediate_response=7:ImmediateResponse "
    "dynamic_metadata=8:bytes",
}
"""Message -> name, number and type of fields; ``*``: repeated. A nested message is bytes."""

_OVERWRITE: Final = 2


def _classes() -> dict[str, Any]:
    """The classes of :data:`_FIELDS`, in a pool of their own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="sluice/ext_proc.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for each in fields.split():
            name, _, rest = each.partition("=")
            number, _, kind = rest.partition(":")
            made = described.field.add(name=name, number=int(number), label=field.LABEL_OPTIONAL)
            if kind.endswith("*"):
                made.label = field.LABEL_REPEATED
            kind = kind.removesuffix("*")
            if kind in _FIELDS:
                made.type, made.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                made.type = field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{_PACKAGE}.{name}")) for name in _FIELDS}


CLASSES: Final = _classes()


class BodyMode(enum.IntEnum):
    """How Envoy sends a body."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


class Part(enum.StrEnum):
    """The part of a request or a response that a message has."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class Received(NamedTuple):
    """A message of Envoy. ``ends``: nothing more follows; ``modes``: how bodies come (first
    message; ``None``: Envoy is too old); ``subset``: allowed ``HOST:PORT`` or ``HOST``, ``None``:
    any."""

    part: Part
    headers: Headers = ()
    body: bytes = b""
    ends: bool = False
    modes: tuple[BodyMode, BodyMode] | None = None
    subset: frozenset[str] | None = None


class MalformedError(ValueError):
    """A message is not one of the protocol, or exceeds a limit."""


def decode(data: bytes) -> Received:
    """A message that Envoy sent, ``O(len(data))``. Raises MalformedError, also for one whose answer
    Envoy would ignore."""
    message = CLASSES["ProcessingRequest"]()
    try:
        message.ParseFromString(data)
        parts = [part for part in Part if message.HasField(part.value)]
        if len(parts) != 1:
            raise MalformedError(f"a message must have one part, this one has {len(parts)}")
        if message.observability_mode:
            raise MalformedError("observability_mode must be off: a picker answers")
        content = getattr(message, parts[0].value)
        modes = None
        if message.HasField("protocol_config"):
            config = message.protocol_config
            modes = BodyMode(config.request_body_mode), BodyMode(config.response_body_mode)
        if parts[0] in (Part.REQUEST_HEADERS, Part.RESPONSE_HEADERS):
            headers = _headers(content.headers.headers)
            subset = _subset(message.metadata_context.filter_metadata)
            return Received(parts[0], headers, b"", content.end_of_stream, modes, subset)
        if parts[0] in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
            return Received(parts[0], (), content.body, content.end_of_stream, modes)
        return Received(parts[0], ends=True, modes=modes)
    except MalformedError:
        raise
    except (DecodeError, ValueError) as error:
        raise MalformedError(f"not a message of external processing: {error}") from None


def _headers(values: Sequence[Any]) -> Headers:
    if len(values) > MAX_HEADERS:
        raise MalformedError(f"a message may have {MAX_HEADERS} headers, this one has more")
    pairs = ((each.key, each.raw_value or each.value.encode()) for each in values)
    headers = [(name.lower().encode(), value) for name, value in pairs]
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise MalformedError(f"headers may have {MAX_HEADER_BYTES} bytes together")
    for name, value in headers:
        if not name or not name.isascii() or any(each in name + value for each in b"\0\r\n"):
            raise MalformedError("a header's name or value has characters that HTTP forbids")
    return headers


def _subset(namespaces: Sequence[Any]) -> frozenset[str] | None:
    for namespace in namespaces:
        if namespace.key == SUBSET_NAMESPACE:
            hint = Struct()
            hint.ParseFromString(namespace.value)
            if SUBSET_KEY not in hint.fields:
                return None
            value = hint.fields[SUBSET_KEY]
            listed = [each.string_value for each in value.list_value.values]
            return frozenset(each.strip() for each in listed or value.string_value.split(","))
    return None


def answer(
    part: Part,
    headers: Headers = (),
    remove: Sequence[str] = (),
    endpoint: str = "",
    clears: bool = False,
) -> bytes:
    """The answer to a part that continues. ``endpoint`` goes to the dynamic metadata; ``clears``:
    the endpoint gets none of this whole body."""
    response = CLASSES["ProcessingResponse"]()
    answered = getattr(response, part.value)
    answered.SetInParent()
    if headers or remove:
        mutation = answered.response.header_mutation
        _set(mutation, headers)
        mutation.remove_headers.extend(remove)
    if clears:
        answered.response.body_mutation.clear_body = True
    return _sealed(response, endpoint)


def streamed(part: Part, body: bytes, ends: bool) -> Iterator[bytes]:
    """A body, in messages of :data:`STREAMED_BYTES`, that replaces what came of it."""
    for begin in range(0, max(1, len(body)), STREAMED_BYTES):
        response = CLASSES["ProcessingResponse"]()
        sent = getattr(response, part.value).response.body_mutation.streamed_response
        sent.SetInParent()
        sent.body = body[begin : begin + STREAMED_BYTES]
        sent.end_of_stream = ends and begin + STREAMED_BYTES >= len(body)
        yield response.SerializeToString()


def immediate(status: int, headers: Headers, body: bytes) -> bytes:
    """A response that Envoy sends in place of the endpoint's."""
    response = CLASSES["ProcessingResponse"]()
    made = response.immediate_response
    made.status.code = status
    made.body = body
    made.details = "sluice"
    _set(made.headers, headers)
    return _sealed(response)


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value


def _sealed(response: Any, endpoint: str = "") -> bytes:
    if endpoint:
        metadata = Struct()
        metadata.update({ENDPOINT_NAMESPACE: {ENDPOINT_KEY: endpoint}})
        response.dynamic_metadata = metadata.SerializeToString()
    data: bytes = response.SerializeToString()
    return data
