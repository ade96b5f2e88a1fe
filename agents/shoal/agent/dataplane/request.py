"""What the front reads of an inference request before it forwards it, and what it refuses to forward.

Names, shapes and datatypes are checked where the model runs. Here only what no model may get is refused: bytes that are
not the protocol, tensors beyond the size limit.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.profile import ITEM_BYTES
from shoal.types.units import Seconds
from shoal.wire.field_limits import CountLimits, check_counts, encode_field, fields_of
from shoal.wire.limits import INFER_BYTES

MAX_RANK: Final = 32
MAX_TENSORS: Final = 1024
"""Inputs of one request; also its requested outputs, and its raw contents."""
MAX_PARAMETERS: Final = 4096
"""Parameters of one request, or of all its tensors together."""
MAX_STRINGS: Final = 64 * 1024
"""Strings in typed contents; raw contents hold any number."""
MAX_FIELDS: Final = 2 * MAX_STRINGS
"""Fields of one request in total: the scan that counts this many takes 0.14 s of CPU."""
MAX_HEAD: Final = 2**20
"""Bytes of a request without its tensors' contents."""
INLINE_BYTES: Final = 64 * 2**10
"""Requests up to this size are parsed whole; of larger ones only the part without tensor contents."""
_RAW_TAG: Final = oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2
"""Before a raw tensor, as every library writes it."""
_CONSTANT_FIELDS: Final = 64
_CONSTANT_BYTES: Final = 1024
"""Most that `constant_part` looks at, and returns: a request of one tensor has some ten fields and 100 bytes."""
_CONTENTS: Final = "inference.InferTensorContents"
_INPUT: Final = "inference.ModelInferRequest.InferInputTensor"
LIMITS: Final = CountLimits(
    fields=MAX_FIELDS,
    repeated=MAX_PARAMETERS,
    by_field={
        **{f"inference.ModelInferRequest.{name}": MAX_TENSORS for name in ("inputs", "outputs", "raw_input_contents")},
        f"{_INPUT}.shape": MAX_TENSORS * MAX_RANK,
        f"{_CONTENTS}.bool_contents": INFER_BYTES,
        **{f"{_CONTENTS}.{name}_contents": INFER_BYTES // 4 for name in ("int", "uint", "fp32")},
        **{f"{_CONTENTS}.{name}_contents": INFER_BYTES // 8 for name in ("int64", "uint64", "fp64")},
        f"{_CONTENTS}.bytes_contents": MAX_STRINGS,
    },
)
"""Limits for an inference request; typed contents may have as many elements as INFER_BYTES hold."""
MAX_SEQUENCE_ID: Final = 256
_REQUEST: Final = oip.ModelInferRequest.DESCRIPTOR
_Tensor = oip.ModelInferRequest.InferInputTensor | oip.ModelInferRequest.InferRequestedOutputTensor


class InferRequestHead(NamedTuple):
    """An inference request without its tensors."""

    # Name of the workload.
    model: str
    # Requested version; empty for any.
    version: str
    # The client's request id; empty without one.
    id: str
    # The protocol's sequence_id as text; empty without one.
    session: str
    # The `timeout` parameter in seconds (sent in microseconds); None without one or for 0.
    timeout_s: Seconds | None
    # sequence_start: the first step of its session.
    start: bool = False
    # sequence_end: the last step of its session.
    end: bool = False
    # sequence_step: number of the step as its client counts, from 1; None where it does not.
    step: int | None = None
    # Whether the answer must say that it is the last of its request: Triton's `triton_enable_empty_final_response`.
    wants_final: bool = False
    # Whether a tensor lies in shared memory (`shared_tensors`).
    uses_shared_memory: bool = False


def parse_request(request: bytes) -> InferRequestHead:
    """Raises ShoalError(INVALID_ARGUMENT | FIELD_TOO_MANY | TOO_LARGE)."""
    if len(request) > MAX_TENSORS:  # else it cannot have more of anything than the smallest limit
        refusal = check_counts(_REQUEST, request, LIMITS)
        if refusal is not None:
            raise ShoalError(refusal) if refusal.code is Code.FIELD_TOO_MANY else _no_request()
    head, _ = _split(request)
    if len(head) > max(MAX_HEAD, INLINE_BYTES):
        raise too_large(f"{len(head)} bytes of a request beside its tensors' contents", MAX_HEAD)
    try:
        message = oip.ModelInferRequest.FromString(head)
    except DecodeError as error:
        raise _no_request() from error
    model = message.model_name
    if not model:
        raise invalid("no model name", "the name of a workload")
    expanded, is_shared = 0, False
    for tensor in message.inputs:
        expanded += elements(tensor.shape, tensor.name) * item_bytes(tensor.datatype, tensor.name)
        if expanded > INFER_BYTES:
            raise too_large(f"inputs of at least {expanded} bytes")
        if tensor.parameters:
            is_shared |= _refers_to_shared_memory(tensor)
    for output in message.outputs:
        if output.parameters:
            is_shared |= _refers_to_shared_memory(output)
    parameters = message.parameters
    if not parameters and not is_shared:
        return InferRequestHead(model, message.model_version, message.id, "", None)
    return InferRequestHead(
        model=model,
        version=message.model_version,
        id=message.id,
        session=_session(parameters),
        timeout_s=_timeout(parameters),
        start=_flag(parameters, "sequence_start"),
        end=_flag(parameters, "sequence_end"),
        step=_step(parameters),
        wants_final=_flag(parameters, "triton_enable_empty_final_response"),
        uses_shared_memory=is_shared,
    )


def constant_part(request: bytes) -> bytes | None:
    """All of a parsed request but the contents of its last raw tensor, where it ends with one. Another request of the
    same length that begins so says the same in all else. None where it does not end so."""
    view, at = memoryview(request), -1
    for count, (_, start, content, _) in enumerate(fields_of(view, 0, len(view))):
        if count == _CONSTANT_FIELDS:
            return None
        at = content if request[start] == _RAW_TAG else -1
    return request[:at] if 0 <= at <= _CONSTANT_BYTES else None


def _refers_to_shared_memory(tensor: _Tensor) -> bool:
    return any(name.startswith("shared_memory") for name in tensor.parameters)


def fingerprint(request: bytes, of: str = "") -> bytes:
    """SHA-256 of what a model sees of a parsed request: the same under any id. `of` is further text to include."""
    head, contents = _split(request)
    message = oip.ModelInferRequest.FromString(head)
    message.id = ""
    found = hashlib.sha256(f"{of}\0".encode() if of else b"")
    found.update(message.SerializeToString(deterministic=True))
    for part in contents:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _split(request: bytes) -> tuple[bytes, tuple[memoryview, ...]]:
    """Split a request whose fields were counted: (a request without tensor contents, these contents in order)."""
    if len(request) <= INLINE_BYTES:
        return request, ()
    view = memoryview(request)
    head: list[bytes | memoryview] = []
    contents: list[memoryview] = []
    for number, start, content, end in fields_of(view, 0, len(view)):
        match number:
            case oip.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER:
                contents.append(view[content:end])
            case oip.ModelInferRequest.INPUTS_FIELD_NUMBER:
                head.append(encode_field(number, tuple(_without_contents(view, content, end, contents))))
            case _:
                head.append(view[start:end])
    return b"".join(head), tuple(contents)


def _without_contents(view: memoryview, at: int, end: int, contents: list[memoryview]) -> Iterator[memoryview]:
    for number, start, content, ends in fields_of(view, at, end):
        if number == oip.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER:
            contents.append(view[content:ends])
        else:
            yield view[start:ends]


def elements(shape: Any, name: str) -> int:
    """Product of the dimensions. Raises ShoalError(INVALID_ARGUMENT) for a negative one or more than `MAX_RANK`."""
    if len(shape) > MAX_RANK:
        raise invalid(f"{len(shape)} dimensions of input {name!r:.80}", f"at most {MAX_RANK}")
    count = 1
    for size in shape:
        if size < 0:
            raise invalid(f"dimension {size} of input {name!r:.80}", "0 or more")
        count *= size
    return count


def item_bytes(datatype: str, name: str) -> int:
    """Raises ShoalError(INVALID_ARGUMENT) for a datatype that the protocol does not have."""
    size = ITEM_BYTES.get(datatype)
    if size is None:
        raise invalid(f"datatype {datatype!r:.80} of input {name!r:.80}", f"one of {', '.join(ITEM_BYTES)}")
    return size


def _no_request() -> ShoalError:
    return invalid("bytes that are no ModelInferRequest", "a request of the Open Inference Protocol")


def invalid(found: str, asked: str) -> ShoalError:
    return refuse(Code.INVALID_ARGUMENT, found, asked, "see the model's metadata for names, datatypes and shapes")


def too_large(found: str, limit: int = INFER_BYTES) -> ShoalError:
    return refuse(Code.TOO_LARGE, found, f"at most {limit} bytes", "send smaller tensors, or several requests")


def _session(parameters: Mapping[str, oip.InferParameter]) -> str:
    """The session's id. Any value but 0 and "" names one; a key of a protobuf map is inserted when read, so it is
    tested first."""
    if "sequence_id" not in parameters:
        return ""
    value = _value(parameters["sequence_id"])
    if isinstance(value, str) and len(value) > MAX_SEQUENCE_ID:
        raise invalid(f"a sequence_id of {len(value)} characters", f"at most {MAX_SEQUENCE_ID}")
    return str(value) if value else ""


def _flag(parameters: Mapping[str, oip.InferParameter], name: str) -> bool:
    value = _value(parameters[name]) if name in parameters else False
    if not isinstance(value, bool):
        raise invalid(f"{name} {value!r:.80}", "true or false")
    return value


def _step(parameters: Mapping[str, oip.InferParameter]) -> int | None:
    if "sequence_step" not in parameters:
        return None
    value = _value(parameters["sequence_step"])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(f"sequence_step {value!r:.80}", "1 or more")
    return value


def _timeout(parameters: Mapping[str, oip.InferParameter]) -> Seconds | None:
    if "timeout" not in parameters:
        return None
    value = _value(parameters["timeout"])
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(f"timeout {value!r:.80}", "microseconds, 0 or more")
    return Seconds(value / 1e6) if value else None


def _value(parameter: oip.InferParameter) -> Any:
    which = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, which) if which else None
