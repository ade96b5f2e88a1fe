"""Parses an untrusted request: its elements are counted first, and it is parsed only if there is memory for that.

protobuf 7's parser (upb) ends the process (SIGSEGV) when it cannot enlarge an array: measured under RLIMIT_DATA with 12
MiB of empty `raw_input_contents`, and with packed arrays of every kind.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from shoal.agent.worker.tensors import DATATYPES, MAX_RANK
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.profile import TensorSpec
from shoal.wire.field_limits import CountLimits, check_counts, fields_of

SPARE_ELEMENTS: Final = 1024
"""Tensors, and elements of typed contents, allowed beyond the model's signature, so that a few too many get an error
that names them."""
MAX_PARAMETERS: Final = 4096
MAX_STRINGS: Final = 64 * 1024
MAX_FIELDS: Final = 2 * MAX_STRINGS
_CONTENTS: Final = oip.InferTensorContents.DESCRIPTOR
_ITEM_BYTES: Final = {
    "bool_contents": 1,
    **dict.fromkeys(("int_contents", "uint_contents", "fp32_contents"), 4),
    **dict.fromkeys(("int64_contents", "uint64_contents", "fp64_contents"), 8),
    "bytes_contents": 16,
}
"""Bytes that the parser keeps per element. Source: upb, message/array.h."""
_GROWTH: Final = 4
"""Arrays grow by doubling, and a message frees the arrays left behind only as a whole: 2 x 2 of what is needed."""
_SMALL: Final = 2**20
"""Requests that need no more than this are parsed without a check: a process without that much memory could run
nothing."""
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0x100))
"""Every byte that does not end a varint."""


class Parser:
    """Parses requests for one model. `headroom` returns the bytes that this process may still map; None: no limit."""

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_bytes: int,
        headroom: Callable[[], int | None],
    ) -> None:
        self._limits = count_limits(inputs, outputs, max_bytes)
        self._headroom = headroom
        self._lock = threading.Lock()

    def parse(self, data: bytes) -> oip.ModelInferRequest:
        """Raises ShoalError(INVALID_ARGUMENT | FIELD_TOO_MANY | TOO_LARGE)."""
        refusal = check_counts(oip.ModelInferRequest.DESCRIPTOR, data, self._limits)
        if refusal is not None:
            raise ShoalError(refusal) if refusal.code is Code.FIELD_TOO_MANY else _no_request()
        needed = bytes_to_parse(data)
        if needed <= _SMALL:
            return _parse(data)
        with self._lock:  # a concurrent request must not take the memory that this one has found free
            room = self._headroom()
            if room is not None and needed > room:
                raise refuse(
                    Code.TOO_LARGE,
                    f"a request that takes {needed} bytes to parse",
                    f"at most the {room} bytes that are left here",
                    "send raw contents, or smaller tensors; or raise the workload's memory",
                )
            return _parse(data)


def count_limits(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_bytes: int) -> CountLimits:
    """The most that a request with this signature can need."""
    request, contents = "inference.ModelInferRequest", _CONTENTS.full_name
    used = {DATATYPES[spec.dtype].field for spec in inputs}
    return CountLimits(
        fields=MAX_FIELDS,
        repeated=MAX_PARAMETERS,
        by_field={
            f"{request}.inputs": len(inputs) + SPARE_ELEMENTS,
            f"{request}.raw_input_contents": len(inputs) + SPARE_ELEMENTS,
            f"{request}.outputs": len(outputs) + SPARE_ELEMENTS,
            f"{request}.InferInputTensor.shape": (len(inputs) + SPARE_ELEMENTS) * MAX_RANK,
            **{
                f"{contents}.{name}": min(MAX_STRINGS, max_bytes // size) if size == 16 else max_bytes // size
                for name, size in _ITEM_BYTES.items()
                if name in used
            },
            **{f"{contents}.{name}": SPARE_ELEMENTS for name in _ITEM_BYTES if name not in used},
        },
    )


def bytes_to_parse(data: bytes) -> int:
    """Upper limit of the memory that parsing takes, for a message that passed the count."""
    view = memoryview(data)
    needed = len(data)
    for number, _, at, end in fields_of(view, 0, len(view)):
        if number != oip.ModelInferRequest.INPUTS_FIELD_NUMBER:
            continue
        for inner, _, start, ends in fields_of(view, at, end):
            if inner == oip.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER:
                needed += _contents_bytes(view, start, ends)
    return needed


def _contents_bytes(view: memoryview, at: int, end: int) -> int:
    found = 0
    for number, _, start, ends in fields_of(view, at, end):
        field = _CONTENTS.fields_by_number.get(number)
        if field is None:
            continue
        size = _ITEM_BYTES[field.name]
        if field.name == "bytes_contents":
            count = 1
        elif field.name in ("fp32_contents", "fp64_contents"):
            count = (ends - start) // size
        else:
            count = len(bytes(view[start:ends]).translate(None, _CONTINUATION_BYTES))
        found += _GROWTH * size * count
    return found


def _parse(data: bytes) -> oip.ModelInferRequest:
    try:
        return oip.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise _no_request() from error


def _no_request() -> ShoalError:
    return refuse(
        Code.INVALID_ARGUMENT, "bytes that are no request", "a ModelInferRequest", "send a well-formed request"
    )
