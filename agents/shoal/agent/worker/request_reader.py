"""Requests to arrays: the usual ones straight from the wire, all others through protobuf.

A usual request has each field once, in its shortest form, raw contents of a datatype of fixed size, and no parameters.
Its arrays are views of its bytes. What the runtime may not take where it lies is copied for the run (`align`).

`read_usual` and protobuf never disagree: what is not usual is None here, so that only protobuf's path refuses.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from shoal.agent.frames import Payload
from shoal.agent.frames.format import END_ALIGNMENT
from shoal.agent.worker.parsing import Parser
from shoal.agent.worker.tensors import DATATYPES, MAX_RANK, Array, Datatype, decode, output_names
from shoal.types.profile import TensorSpec

_MODEL, _VERSION, _ID, _INPUT, _OUTPUT, _RAW = (number << 3 | 2 for number in (1, 2, 3, 5, 6, 7))
"""Tags of ModelInferRequest's fields."""
_NAME, _DATATYPE, _SHAPE, _DIM = 1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2, 3 << 3
"""Tags of InferInputTensor's fields; `_DIM` is one element of an unpacked shape."""
_MAX_VARINT: Final = 9
"""Bytes of a varint up to 2^63 - 1; a longer one is negative or not in its shortest form."""
_MAX_KNOWN: Final = 256
_MAX_KNOWN_BYTES: Final = 1024
"""A worker keeps what it made of this many tensor heads of at most this size: clients repeat theirs."""


_LARGE_BYTES: Final = 2**16
"""Of floats. To ask numpy where they lie takes 1.0 us, and to copy 110 KB 2.9 (least of 12 rounds)."""
_MAX_LAYOUTS: Final = 32
"""The same, of whole requests."""


class RequestNames(NamedTuple):
    """What an answer repeats of its request, in UTF-8."""

    model: bytes
    # Empty if the client named none.
    version: bytes
    id: bytes


class InferRequest(NamedTuple):
    """A request, checked against the model's signature."""

    names: RequestNames
    # Arrays by input.
    feeds: dict[str, Array]
    # Outputs to compute, in this order.
    outputs: Sequence[str]


class _TensorHead(NamedTuple):
    """An input as its InferInputTensor says, without contents."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    # Number of elements.
    elements: int
    # Bytes of the raw contents.
    size: int


class _Layout(NamedTuple):
    """What requests of one length say that differ in the contents of their tensors alone."""

    # (start, end, bytes) of all that is not contents.
    fixed: tuple[tuple[int, int, bytes], ...]
    names: RequestNames
    heads: tuple[_TensorHead, ...]
    # Offset and size of each head's contents.
    raws: tuple[tuple[int, int], ...]
    outputs: Sequence[str]

    def is_of(self, data: Payload) -> bool:
        """Whether a request of its length says the same."""
        for start, end, said in self.fixed:  # noqa: SIM110 (a generator takes longer than what it compares)
            if data[start:end] != said:
                return False
        return True


class RequestReader:
    """Reads requests for one model. Callable from any thread.

    `headroom`: as in `Parser`.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_bytes: int,
        headroom: Callable[[], int | None],
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._max_bytes = max_bytes
        self._parser = Parser(inputs, outputs, max_bytes, headroom)
        self._specs = {spec.name: spec for spec in inputs}
        self._all_outputs = tuple(spec.name for spec in outputs)
        self._output_names = frozenset(self._all_outputs)
        # Of a usual request: its texts, a head and contents of each input, and the outputs that it names.
        self._max_fields = 3 + 2 * len(inputs) + len(outputs)
        self._known: dict[bytes, _TensorHead] = {}
        self._layouts: dict[int, _Layout] = {}
        """Of the latest requests, by their length."""

    def read(self, data: Payload) -> InferRequest:
        """Raises ShoalError(INVALID_ARGUMENT | FIELD_TOO_MANY | TOO_LARGE | UNIMPLEMENTED)."""
        return self.read_usual(data) or self._read_any(data)

    def read_usual(self, data: Payload) -> InferRequest | None:
        """None if the request is invalid or unusual. Takes time by the number of tensors, and one copy at most."""
        try:
            return self._read_usual(data, is_whole=True)
        except (IndexError, ValueError):  # the data ends in a field, a text is not UTF-8, a shape fits no array
            return None

    def read_views(self, data: Payload) -> InferRequest | None:
        """As `read_usual`, in a time that does not grow with the contents: an array may lie at an odd address, and a
        request with BOOL, whose every byte must be looked at, is None."""
        try:
            return self._read_usual(data, is_whole=False)
        except (IndexError, ValueError):
            return None

    def _read_any(self, data: Payload) -> InferRequest:
        request = self._parser.parse(bytes(data))
        feeds = decode(request, self._inputs, self._max_bytes)
        names = RequestNames(request.model_name.encode(), request.model_version.encode(), request.id.encode())
        return InferRequest(names, feeds, output_names(request, self._outputs))

    def _read_usual(self, data: Payload, *, is_whole: bool) -> InferRequest | None:
        layout = self._layouts.get(len(data))
        if layout is None or not layout.is_of(data):
            layout = self._read_layout(data)
            if layout is None:
                return None
            self._keep(layout, len(data))
        feeds = self._feeds(data, layout.heads, layout.raws, is_whole=is_whole)
        return None if feeds is None else InferRequest(layout.names, feeds, layout.outputs)

    def _keep(self, layout: _Layout, size: int) -> None:
        if sum(len(said) for _, _, said in layout.fixed) <= _MAX_KNOWN_BYTES:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[size] = layout

    def _read_layout(self, data: Payload) -> _Layout | None:
        """Raises IndexError, ValueError as `read_usual` catches them."""
        texts: dict[int, bytes] = {}
        left = self._max_fields
        heads: list[_TensorHead] = []
        raws: list[tuple[int, int]] = []
        outputs: list[str] = []
        at, end = 0, len(data)
        while at < end:
            tag = data[at]
            size = data[at + 1]
            at += 2
            if size > 0x7F:
                size, at = _varint(data, at - 1)
            after = at + size
            left -= 1
            if after > end or left < 0:
                return None
            if tag == _RAW:
                raws.append((at, size))
            elif tag == _INPUT:
                head = self._head(bytes(data[at:after]))
                if head is None:
                    return None
                heads.append(head)
            elif tag in (_MODEL, _VERSION, _ID) and tag not in texts:
                texts[tag] = text = bytes(data[at:after])
                if not text.isascii():
                    text.decode()
            elif tag == _OUTPUT:
                outputs.append(_only_name(bytes(data[at:after])))
            else:
                return None
            at = after
        if not self._output_names.issuperset(outputs) or len(set(outputs)) != len(outputs):
            return None
        starts = (0, *(at + size for at, size in raws))
        ends = (*(at for at, _ in raws), end)
        fixed = tuple((start, stop, bytes(data[start:stop])) for start, stop in zip(starts, ends, strict=True))
        names = RequestNames(texts.get(_MODEL, b""), texts.get(_VERSION, b""), texts.get(_ID, b""))
        return _Layout(fixed, names, tuple(heads), tuple(raws), outputs or self._all_outputs)

    def _feeds(
        self, data: Payload, heads: Sequence[_TensorHead], raws: Sequence[tuple[int, int]], *, is_whole: bool
    ) -> dict[str, Array] | None:
        if not len(heads) == len(raws) == len(self._specs) or sum(size for _, size in raws) > self._max_bytes:
            return None
        feeds: dict[str, Array] = {}
        for head, (at, size) in zip(heads, raws, strict=True):
            if size != head.size or head.name in feeds:
                return None
            dtype = head.datatype.dtype
            flat = np.frombuffer(data, dtype, head.elements, at) if size else np.empty(0, dtype)
            if head.datatype.name == "BOOL" and size and (not is_whole or flat.view(np.uint8).max() > 1):
                return None
            feeds[head.name] = (align(flat) if is_whole else flat).reshape(head.shape)
        return feeds

    def _head(self, data: bytes) -> _TensorHead | None:
        known = self._known.get(data)
        if known is not None:
            return known
        found = self._read_head(data)
        if found is not None and len(data) <= _MAX_KNOWN_BYTES:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[data] = found
        return found

    def _read_head(self, data: bytes) -> _TensorHead | None:
        """None if the tensor is invalid, unusual, or does not fit the signature."""
        texts: dict[int, str] = {}
        shape: list[int] = []
        at = 0
        while at < len(data):
            tag = data[at]
            value, at = _varint(data, at + 1)
            if tag == _DIM:
                shape.append(value)
                continue
            after = at + value
            if after > len(data):
                return None
            if tag == _SHAPE:
                while at < after:
                    dim, at = _varint(data, at)
                    shape.append(dim)
                if at != after:
                    return None
            elif tag in (_NAME, _DATATYPE) and tag not in texts:
                texts[tag] = data[at:after].decode()
            else:
                return None
            at = after
        spec = self._specs.get(texts.get(_NAME, ""))
        if spec is None or texts.get(_DATATYPE, "") != spec.dtype or spec.dtype == "BYTES" or len(shape) > MAX_RANK:
            return None
        # as in `tensors`: the runtime gives () for a scalar and for an unknown rank alike
        if spec.shape and not (
            len(shape) == len(spec.shape) and all(b in (-1, a) for a, b in zip(shape, spec.shape, strict=True))
        ):
            return None
        datatype, count = DATATYPES[spec.dtype], math.prod(shape)
        size = count * datatype.dtype.itemsize
        if size > self._max_bytes:
            return None
        return _TensorHead(spec.name, datatype, tuple(shape), count, size)


def align(array: Array) -> Array:
    """Of floats a copy, which lies where the C library puts it: at a multiple of 16 bytes. ONNX Runtime's kernels take
    16 bytes at once. Where the first are not at such a multiple, they sum in another order, and the last bits of an
    answer would depend on the length of the request's id. Large ones mostly lie so, at the end of a payload
    (`frames.format`); of others it takes longer to tell where they lie than to copy them. Sums of integers do not
    depend on it; loops are vectorised on the assumption that an item lies at a multiple of its size."""
    if array.dtype.kind in "iub":
        return array if array.flags.aligned else array.copy()
    if array.nbytes >= _LARGE_BYTES and array.ctypes.data % END_ALIGNMENT == 0:
        return array
    return array.copy()


def _only_name(data: bytes) -> str:
    """The name in an InferRequestedOutputTensor of nothing else. Raises ValueError, IndexError."""
    size, at = _varint(data, 1)
    if data[0] != _NAME or at + size != len(data):
        raise ValueError("more than a name")
    return data[at:].decode()


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """A number below 2^63, and the offset after it. Raises ValueError, IndexError at the end."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            if not byte and shift:
                break
            return value, at
    raise ValueError("a varint of more than nine bytes, or not in its shortest form")
