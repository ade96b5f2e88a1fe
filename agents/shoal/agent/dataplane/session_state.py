"""Moves state tensors in and out of a step: added before the worker gets it, removed before its client does."""

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from shoal.agent.core.sequences import SessionState, StateTensor
from shoal.agent.dataplane.json_tensors import FORMATS
from shoal.agent.dataplane.request import invalid
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.profile import ITEM_BYTES

_FIELDS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def zeros(metadata: oip.ModelMetadataResponse, inputs: Iterable[str], most: int) -> SessionState:
    """The state that a session begins with: zeros of the declared shape, 1 for a dynamic axis.

    Raises ShoalError(SESSION_INVALID) for more than `most` bytes.
    """
    found, left = {}, most
    for spec in metadata.inputs:
        if spec.name in inputs:
            shape = tuple(1 if size < 0 else size for size in spec.shape)
            size = math.prod(shape) * ITEM_BYTES[spec.datatype]
            if size > left:
                asked = f"at most {most} of all state inputs"
                raise refuse(Code.SESSION_INVALID, f"{size} bytes of {spec.name!r:.80}", asked, "take another model")
            left -= size
            found[spec.name] = StateTensor(spec.datatype, shape, bytes(size))
    return found


def with_state(request: bytes, state: SessionState, session: Mapping[str, str]) -> bytes:
    """The request for the worker, with the state added. `session` maps each state input to its output.

    Raises ShoalError(SESSION_INVALID | INVALID_ARGUMENT), because a client may neither send nor request state.
    """
    message = oip.ModelInferRequest.FromString(request)
    hidden = {*session, *session.values()}
    named = [each.name for each in message.inputs] + [each.name for each in message.outputs]
    told = [name for name in named if name in hidden]
    if told:
        raise refuse(
            Code.SESSION_INVALID,
            f"tensor {told[0]!r:.80}, which is the session's state",
            "the other inputs and outputs",
            "leave it out: the server keeps the state of each sequence_id",
        )
    raw = bool(message.raw_input_contents) or not message.inputs
    for name, tensor in sorted(state.items()):
        into = message.inputs.add(name=name, datatype=tensor.dtype, shape=tensor.shape)
        if raw:
            message.raw_input_contents.append(tensor.content)
        else:
            _fill(into, tensor)
    if message.outputs:
        for output in session.values():
            message.outputs.add(name=output)
    return message.SerializeToString()


def _fill(into: oip.ModelInferRequest.InferInputTensor, tensor: StateTensor) -> None:
    field = _FIELDS.get(tensor.dtype)
    if field is None:
        raise invalid(f"typed contents beside state of {tensor.dtype}", "raw_input_contents")
    count = len(tensor.content) // ITEM_BYTES[tensor.dtype]
    getattr(into.contents, field).extend(struct.unpack(f"<{count}{FORMATS[tensor.dtype]}", tensor.content))


def without_state(answer: bytes, session: Mapping[str, str]) -> tuple[bytes, SessionState]:
    """(answer for the client, state after the step). Raises ShoalError(RUNTIME_FAILED) if the model returned no
    state."""
    try:
        message = oip.ModelInferResponse.FromString(answer)
    except DecodeError as error:
        raise _no_state("bytes that are no answer") from error
    outputs, raws = list(message.outputs), list(message.raw_output_contents)
    found = {
        each.name: StateTensor(each.datatype, tuple(each.shape), raw) for each, raw in zip(outputs, raws, strict=False)
    }
    missing = [output for output in session.values() if output not in found]
    if missing or len(raws) != len(outputs):
        raise _no_state(f"no output {', '.join(missing)}")
    del message.outputs[:], message.raw_output_contents[:]
    for each, raw in zip(outputs, raws, strict=True):
        if each.name not in session.values():
            message.outputs.append(each)
            message.raw_output_contents.append(raw)
    return message.SerializeToString(), {name: found[output] for name, output in session.items()}


def hide_state(metadata: oip.ModelMetadataResponse, session: Mapping[str, str]) -> None:
    """Remove the state tensors from the metadata that a client sees."""
    shown_inputs = [each for each in metadata.inputs if each.name not in session]
    shown_outputs = [each for each in metadata.outputs if each.name not in session.values()]
    del metadata.inputs[:], metadata.outputs[:]
    metadata.inputs.extend(shown_inputs)
    metadata.outputs.extend(shown_outputs)


def _no_state(found: str) -> ShoalError:
    return refuse(Code.RUNTIME_FAILED, found, "the outputs that the workload's session names", "check spec.session")
