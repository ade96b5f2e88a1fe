"""What the front must know of an inference request before it passes on, and what it will not pass on.

Names, shapes and datatypes are judged where the model is; here only what no model may get: what is not the protocol,
what expands beyond the cap, what asks for memory of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.profile import ITEM_BYTES
from shoal.types.units import Seconds
from shoal.wire.limits import INFER_BYTES

MAX_RANK: Final = 32
MAX_SEQUENCE_ID: Final = 256
_Tensor = oip.ModelInferRequest.InferInputTensor | oip.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True, slots=True)
class Asked:
    """session: the protocol's sequence_id as text, "" without one; start, end: its first and last step; step: which one
    it is as its client counts, from 1, None where it does not. timeout_s: the `timeout` parameter (sent in us)."""

    model: str
    version: str
    id: str
    session: str
    timeout_s: Seconds | None
    start: bool = False
    end: bool = False
    step: int | None = None


def read(request: bytes) -> Asked:
    """Raises ShoalError(INVALID_ARGUMENT | TOO_LARGE | UNIMPLEMENTED)."""
    try:
        message = oip.ModelInferRequest.FromString(request)
    except DecodeError as error:
        raise invalid("bytes that are no ModelInferRequest", "a request of the Open Inference Protocol") from error
    if not message.model_name:
        raise invalid("no model name", "the name of a workload")
    expanded = 0
    for tensor in message.inputs:
        expanded += elements(tensor.shape, tensor.name) * item_bytes(tensor.datatype, tensor.name)
        if expanded > INFER_BYTES:
            raise too_large(f"inputs of at least {expanded} bytes")
    tensors: tuple[_Tensor, ...] = (*message.inputs, *message.outputs)
    for parameters in (tensor.parameters for tensor in tensors):
        if any(name.startswith("shared_memory") for name in parameters):
            raise refuse(Code.UNIMPLEMENTED, "shared memory", "tensors in the request", "send the bytes themselves")
    return Asked(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        session=_session(message.parameters),
        timeout_s=_timeout(message.parameters),
        start=_flag(message.parameters, "sequence_start"),
        end=_flag(message.parameters, "sequence_end"),
        step=_step(message.parameters),
    )


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


def invalid(found: str, asked: str) -> ShoalError:
    return refuse(Code.INVALID_ARGUMENT, found, asked, "see the model's metadata for names, datatypes and shapes")


def too_large(found: str, limit: int = INFER_BYTES) -> ShoalError:
    return refuse(Code.TOO_LARGE, found, f"at most {limit} bytes", "send smaller tensors, or several requests")


def _session(parameters: Mapping[str, oip.InferParameter]) -> str:
    """Any value but 0 and "" names a sequence. Reading a key of a protobuf map would insert it: ask first."""
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
