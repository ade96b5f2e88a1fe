"""Which tensors of a graph the runtime keeps with their channels in blocks, and the copies between both layouts.

Source: ONNX Runtime 1.32, core/optimizer/nchwc_transformer.cc: convolutions on x86 processors take and make tensors
whose channels stand in blocks. What reads or makes a tensor in the usual layout needs a copy.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from onnx import NodeProto, TensorProto, ValueInfoProto

from shoal.coordinator.core.graph.contents import domain_of, input_names
from shoal.coordinator.core.graph.flops import VIEWS, NodeSite
from shoal.coordinator.core.graph.infer import attributes_of
from shoal.coordinator.core.graph.run_memory import Made, Task, Tensor
from shoal.coordinator.core.graph.values import UNKNOWN, Value

_BLOCK: Final = 16
"""Channels of one block with AVX-512 (core/mlas/lib/platform.cpp). With AVX2 they are 8, which pads less."""
_ALIGNMENT: Final = 4
"""Channels that a copy into blocks takes must be a multiple of it."""
_POOLS: Final = frozenset({"AveragePool", "MaxPool"})
_GLOBAL_POOLS: Final = frozenset({"GlobalAveragePool", "GlobalMaxPool"})
_WINDOWS: Final = frozenset({*_POOLS, "Conv", "ConvTranspose", "LpPool", "Pad", "Resize", "Slice", "Upsample"})
_ACTIVATIONS: Final = frozenset({"Relu", "Sigmoid", "Tanh"})
_LINEAR: Final = frozenset({"Add", "BatchNormalization", "Mul"})
"""What becomes part of a convolution's weights."""
_IN_PLACE: Final = frozenset(
    {
        "Abs", "Add", "Ceil", "Clip", "Div", "Elu", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Log", "Mul", "Neg",
        "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh", "ThresholdedRelu",
    }
)  # fmt: skip
"""Kernels that may write to the block of an input: `MayInplace` in core/providers/cpu."""


class Step(NamedTuple):
    """One node of a graph as it ran."""

    node: NodeProto
    # Values of `node.input`, in order; of an input that is not given, one of unknown shape.
    inputs: Sequence[Value]
    # Values of `node.output`, in order. Fewer where the node is a body that returned fewer.
    outputs: Sequence[Value]
    # Bytes that the graphs inside the node hold while they run.
    inner_bytes: int
    # The kernel of an earlier node computes it.
    is_absorbed: bool


@dataclass(slots=True)
class _Kernel:
    """A kernel while its nodes are gathered."""

    # Operator of its first node.
    operator: str
    # As of `Task`.
    reads: list[Tensor]
    # As of `Task`.
    reusable: list[Tensor]
    # Its outputs.
    made: list[Made]
    # Its first output has the channels in blocks.
    is_blocked: bool
    # Where the runtime's list of nodes has it: what an optimiser makes is appended.
    place: int
    # What it takes while it runs, besides.
    workspace_bytes: int
    # Its first output is its first input under another shape.
    is_view: bool
    # A convolution that has an activation or a sum already takes no further sum.
    is_closed: bool = False


class OpenAxes(StrEnum):
    """Of a tensor: which axes have no fixed length before a run. The runtime compares sizes by lengths and names."""

    NAMED = "named"
    # Beyond the first axis, so that what slides a window over them makes lengths without names.
    NAMED_INNER = "named inner"
    UNNAMED = "unnamed"


_ORDER: Final = tuple(OpenAxes)


def tasks_of(steps: Sequence[Step], results: Iterable[str], inputs: Mapping[str, OpenAxes]) -> list[Task]:
    """The kernels that the runtime makes of the graph, copies between layouts among them; in no order. inputs: those
    of the model, by name."""
    return _Lowering(steps, results, inputs).tasks()


def padding_flops(site: NodeSite, flops: float, block: int) -> float:
    """Of the zeros that fill up the last blocks of a convolution's channels, which its kernel multiplies as well: the
    transformer rounds those that it makes and those that it reads up. flops: of the node. block: channels of one.
    0 where the runtime keeps none."""
    step = Step(site.node, site.inputs, site.outputs, 0, False)
    if domain_of(step.node) or step.node.op_type != "Conv" or not _is_of_images(step):
        return 0.0
    if not _is_blocked_convolution(step) or _groups(step) > 1:
        return 0.0  # blocks of groups are whole
    made, each, *_ = step.inputs[1].shape or (0, 0)
    if not made * each or (each >= block and each % _ALIGNMENT):
        return 0.0
    read = each if each < block else _whole_blocks(each, block)
    return flops * (_whole_blocks(made, block) * read / (made * each) - 1)


def open_axes_of(info: ValueInfoProto) -> OpenAxes:
    found = info.type.tensor_type.shape.dim
    names = [(number, each.dim_param) for number, each in enumerate(found) if not each.HasField("dim_value")]
    if not all(name for _, name in names):
        return OpenAxes.UNNAMED
    return OpenAxes.NAMED_INNER if any(number for number, _ in names) else OpenAxes.NAMED


def _is_image(value: Value) -> bool:
    return value.dtype == TensorProto.FLOAT and value.shape is not None and len(value.shape) == 4


def _is_of_images(step: Step) -> bool:
    """Whether the node makes images of images."""
    if not (step.inputs and step.outputs and step.node.output[0]):
        return False
    return _is_image(step.inputs[0]) and _is_image(step.outputs[0])


def _whole_blocks(channels: int, block: int) -> int:
    """Channels with those that fill up the last block."""
    return -(-channels // block) * block


class _Lowering:
    def __init__(self, steps: Sequence[Step], results: Iterable[str], inputs: Mapping[str, OpenAxes]) -> None:
        self._steps = steps
        # By tensor; those that are not there are `NAMED`.
        self._open = dict(inputs)
        self._results = tuple(results)
        # Reads by the graphs inside a node count too: what they read is no kernel's own.
        self._readers = Counter(name for step in steps for name in input_names(step.node))
        self._readers.update(self._results)
        # By tensor: the kernel that makes it.
        self._makers = dict[str, _Kernel]()
        self._values = dict[str, Value]()
        # Names of the tensors that are made in blocks.
        self._blocked = set[str]()
        self._kernels = list[_Kernel]()

    def tasks(self) -> list[Task]:
        for index, step in enumerate(self._steps):
            for name, value in zip(step.node.input, step.inputs, strict=True):
                self._values.setdefault(name, value)
            for name, value in zip(step.node.output, step.outputs, strict=False):
                self._values[name] = value
            self._open |= dict.fromkeys(step.node.output, self._open_axes(step))
            if step.outputs and all(value.constant for value in step.outputs):
                continue  # folded as the model is loaded
            if not (step.is_absorbed and step.outputs and self._absorb(step)):
                self._add(index, step)
        return [*(_task(each) for each in self._kernels), *self._copies()]

    def _absorb(self, step: Step) -> bool:
        """Whether the kernel that makes an input takes the node as well."""
        for name, other in zip(step.node.input[:2], step.node.input[1::-1] or ("",), strict=False):
            kernel = self._makers.get(name)
            if kernel is None or self._readers[name] != 1 or kernel.is_view:
                continue
            if kernel.is_blocked and not _is_image(step.outputs[0]):
                return False
            rest = [each for each in step.node.input if each and each != name and each in self._makers]
            if kernel.operator == "Conv" and step.node.op_type == "Add" and rest:
                if not (kernel.is_blocked and other in self._blocked) or kernel.is_closed:
                    return False
                kernel.is_closed = True
                kernel.reusable = [Tensor(other, True)]
                kernel.reads += kernel.reusable
            else:
                also = [Tensor(each, kernel.is_blocked and each in self._blocked) for each in rest]
                kernel.reads += [each for each in also if each not in kernel.reads]
                kernel.is_closed |= step.node.op_type not in _LINEAR
                # x * Sigmoid(x) and Gelu are kernels that do not work in place.
                kernel.reusable = []
            self._rename(kernel, name, step)
            return True
        return False

    def _open_axes(self, step: Step) -> OpenAxes:
        """Of the outputs."""
        name = step.node.op_type
        if name in _GLOBAL_POOLS:
            return OpenAxes.NAMED
        found = [self._open.get(each, OpenAxes.NAMED) for each in input_names(step.node)]
        worst = max(found, key=_ORDER.index, default=OpenAxes.NAMED)
        return OpenAxes.UNNAMED if name in _WINDOWS and worst is not OpenAxes.NAMED else worst

    def _made(self, name: str, value: Value, *, is_blocked: bool) -> Made:
        """The tensor in one of its layouts."""
        is_known = self._open.get(name) is not OpenAxes.UNNAMED
        if not is_blocked:
            return Made(Tensor(name), value.nbytes or 0, value.shape if is_known else None)
        batch, channels, *sides = value.shape or (0, 0)
        shape = (batch, _whole_blocks(channels, _BLOCK), *sides)
        return Made(Tensor(name, True), 4 * math.prod(shape), shape if is_known else None)

    def _rename(self, kernel: _Kernel, before: str, step: Step) -> None:
        """The kernel's output is the node's from now on."""
        name, value = step.node.output[0], step.outputs[0]
        del self._makers[before]
        self._makers[name] = kernel
        if kernel.is_blocked:
            self._blocked.discard(before)
            self._blocked.add(name)
        kernel.made[0] = self._made(name, value, is_blocked=kernel.is_blocked)
        kernel.place = max(kernel.place, len(self._steps))

    def _add(self, index: int, step: Step) -> None:
        node, count = step.node, len(self._steps)
        is_own = not domain_of(node)
        read = [name for name in dict.fromkeys(input_names(node)) if name in self._makers]
        made = [
            self._made(name, value, is_blocked=False)
            for name, value in zip(node.output, step.outputs, strict=False)
            if name
        ]
        is_view = is_own and node.op_type in VIEWS and bool(node.input)
        reads = [Tensor(name) for name in read]
        reusable = [Tensor(name) for name in node.input if name in read] if is_own and node.op_type in _IN_PLACE else []
        kernel = _Kernel(node.op_type, reads, reusable, made, False, index, step.inner_bytes, is_view)
        if is_own and self._is_blocked(step):
            kernel.is_blocked, kernel.place = True, 2 * count + 2 * index
            if node.op_type != "Conv" or _reorders_input(step):
                # The first input also where the caller holds it: then it is copied.
                kernel.reads = [Tensor(name, True) for name in dict.fromkeys((node.input[0], *read))]
                kernel.reusable = [each._replace(is_blocked=True) for each in reusable]
            self._blocked.add(node.output[0])
            kernel.made[0] = self._made(node.output[0], step.outputs[0], is_blocked=True)
        elif is_own and node.op_type == "Transpose" and _puts_channels_last(step):
            kernel.reads = [each._replace(is_blocked=each.name in self._blocked) for each in reads]
        elif is_own and node.op_type == "ConvTranspose":
            kernel.workspace_bytes += _columns_bytes(step)
        self._kernels.append(kernel)
        for name in node.output:
            self._makers[name] = kernel

    def _is_blocked(self, step: Step) -> bool:
        """Whether the runtime replaces the node by a kernel that makes its output in blocks."""
        node, name = step.node, step.node.op_type
        if not _is_of_images(step):
            return False
        shape = step.inputs[0].shape or (0, 0)
        all_blocked = all(each in self._blocked for each in node.input)
        match name:
            case "Conv":
                return _is_blocked_convolution(step)
            case "Add" | "Sum" | "Mul":
                return all_blocked and all(value.shape == shape for value in step.inputs)
            case "Concat":
                aligned = all(_is_image(value) and (value.shape or (0, 1))[1] % _BLOCK == 0 for value in step.inputs)
                return all_blocked and aligned and attributes_of(node).get("axis") == 1
            case "Resize" | "Upsample":
                return node.input[0] in self._blocked and _is_whole_nearest(step)
            case "BatchNormalization":
                return node.input[0] in self._blocked
        if name in _ACTIVATIONS:
            return node.input[0] in self._blocked
        is_pool = name in _POOLS or (name in _GLOBAL_POOLS and node.input[0] in self._blocked)
        return is_pool and shape[1] % _BLOCK == 0 and len(node.output) == 1

    def _copies(self) -> Iterable[Task]:
        """Those between both layouts, once for each tensor that is read in the other one."""
        count = len(self._steps)
        # By tensor: where the first kernel that reads it stands.
        wanted = dict.fromkeys((Tensor(name) for name in self._results), 0)
        for kernel in sorted(self._kernels, key=lambda each: -each.place):
            wanted |= dict.fromkeys(kernel.reads, kernel.place)
        for number, (tensor, reader) in enumerate(wanted.items()):
            name, is_blocked = tensor
            if is_blocked == (name in self._blocked):
                continue
            source = (Tensor(name, not is_blocked),) if name in self._makers else ()
            place = reader + 1 if is_blocked else 4 * count + number
            made = self._made(name, self._values[name], is_blocked=is_blocked)
            yield Task(source, (), (made,), 0, False, place, is_copy=True)


def _task(kernel: _Kernel) -> Task:
    return Task(
        tuple(kernel.reads),
        tuple(kernel.reusable),
        tuple(kernel.made),
        kernel.workspace_bytes,
        kernel.is_view,
        kernel.place,
    )


def _groups(step: Step) -> int:
    return int(attributes_of(step.node).get("group", 1))


def _is_blocked_convolution(step: Step) -> bool:
    weights = step.inputs[1] if len(step.inputs) > 1 else None
    if weights is None or not weights.constant or not _is_image(weights):
        return False
    if len(step.inputs) > 2 and step.node.input[2] and not step.inputs[2].constant:
        return False
    made, each, *_ = weights.shape or (0, 0)
    groups = _groups(step)
    if groups == 1:
        return each < _BLOCK or each % _ALIGNMENT == 0
    if groups < 1 or made % _BLOCK:
        return False
    return (each == 1 and made == groups) or (
        each % _BLOCK == 0 and made % groups == 0 and made // groups % _BLOCK == 0
    )


def _reorders_input(step: Step) -> bool:
    """A convolution of few channels reads them as they are."""
    return _groups(step) > 1 or (step.inputs[1].shape or (0, 0))[1] >= _BLOCK


def _is_whole_nearest(step: Step) -> bool:
    """Whether each pixel becomes so many equal ones."""
    given = attributes_of(step.node)
    if given.get("mode", b"nearest") != b"nearest" or len(step.inputs) > 3:
        return False
    if step.node.op_type == "Resize":
        if given.get("coordinate_transformation_mode", b"half_pixel") != b"asymmetric":
            return False
        if given.get("nearest_mode", b"round_prefer_floor") != b"floor":
            return False
    scales = step.inputs[-1].data
    if scales is None or scales.size != 4 or scales.dtype.kind != "f":
        return False
    batch, channels, *sides = (float(each) for each in scales.reshape(-1))
    return batch == channels == 1 and all(each >= 1 and each.is_integer() for each in sides)


def _puts_channels_last(step: Step) -> bool:
    """The copy out of blocks does this as well."""
    return list(attributes_of(step.node).get("perm", ())) == [0, 2, 3, 1]


def _columns_bytes(step: Step) -> int:
    """What a transposed convolution multiplies into before it adds up the results (conv_transpose.cc)."""
    x, weights = (value.shape for value in (*step.inputs, UNKNOWN, UNKNOWN)[:2])
    if weights is None or x is None:
        return 0
    return 4 * math.prod(weights[1:]) * math.prod(x[2:])
