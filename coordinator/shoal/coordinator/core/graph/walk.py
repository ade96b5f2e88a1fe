"""Runs a graph on shapes instead of tensors: the cost of each operator, and the peak of live bytes."""

from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from shoal.coordinator.core.graph.blocked_layout import Step, open_axes_of, padding_flops, tasks_of
from shoal.coordinator.core.graph.contents import (
    FunctionKey,
    domain_of,
    function_key,
    input_names,
    operator_name,
    opsets_of,
    subgraphs,
)
from shoal.coordinator.core.graph.flops import VIEWS, NodeSite, flops, memory_traffic
from shoal.coordinator.core.graph.infer import attributes_of, infer
from shoal.coordinator.core.graph.kernels import absorbed_nodes, convolution_bytes, intensity_of, kind_of, weight_bytes
from shoal.coordinator.core.graph.run_memory import NOTHING, RunBytes, Tensor, run_bytes
from shoal.coordinator.core.graph.values import UNKNOWN, Value, value_from_tensor, value_from_type
from shoal.types.profile import CHANNEL_BLOCKS

TensorScope = MutableMapping[str, Value]

_SCAN_BATCHED: Final = 8
"""The opset whose Scan has a batch axis; later opsets have none (ONNX, Changelog.md, Scan-8 and Scan-9)."""


@dataclass(slots=True)
class Cost:
    """Cost of all nodes of one operator: their number, FLOPs, and bytes read and written."""

    nodes: int = 0
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class KernelSum:
    """Sum of kernels of one kind that are about equally intense, as `KernelCost` has it."""

    # How often one is started.
    launches: float = 0.0
    # A multiply-add counts as 2.
    flops: float = 0.0
    # Read and written.
    bytes: float = 0.0
    # Of constants.
    weight_bytes: float = 0.0
    # Of zeros, by block of `CHANNEL_BLOCKS`; also where all are 0.
    padding_flops: tuple[float, ...] = (0.0,) * len(CHANNEL_BLOCKS)

    def add(self, other: "KernelSum", times: float = 1.0) -> None:
        self.launches += other.launches * times
        self.flops += other.flops * times
        self.bytes += other.bytes * times
        self.weight_bytes += other.weight_bytes * times
        both = zip(self.padding_flops, other.padding_flops, strict=True)
        self.padding_flops = tuple(mine + times * its for mine, its in both)


@dataclass(slots=True)
class CostTally:
    """Costs of a graph."""

    # By operator name (`Conv`, `com.microsoft:FusedMatMul`).
    costs: dict[str, Cost] = field(default_factory=dict)
    # By kind and intensity.
    kernels: dict[tuple[str, int], KernelSum] = field(default_factory=dict)
    # Number of nodes whose cost is a lower bound.
    unknown: int = 0
    # Of all weights of convolutions.
    largest_convolution_bytes: int = 0
    # As of `ModelProfile`; of the main graph alone.
    layout_copies: int = 0
    # Likewise.
    layout_bytes: int = 0
    # As of `ModelProfile`.
    folded_bytes: int = 0

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs.values())

    def add(self, name: str, *, flops: float = 0.0, traffic: float = 0.0) -> None:
        cost = self.costs.setdefault(name, Cost())
        cost.nodes, cost.flops, cost.bytes = cost.nodes + 1, cost.flops + flops, cost.bytes + traffic

    def add_kernel(self, site: NodeSite, flops: float, traffic: float) -> None:
        kind = kind_of(site, flops, traffic)
        if kind:
            weights = min(weight_bytes(site), traffic)
            found = self.kernels.setdefault((kind, intensity_of(flops, traffic)), KernelSum())
            padding = tuple(padding_flops(site, flops, block) for block in CHANNEL_BLOCKS)
            found.add(KernelSum(1.0, flops, traffic - weights, weights, padding))
        self.largest_convolution_bytes = max(self.largest_convolution_bytes, convolution_bytes(site))

    def add_copy(self, size: int) -> None:
        """Between layouts, of so many bytes, which are read and written."""
        self.layout_copies += 1
        self.layout_bytes += 2 * size

    def merge(self, other: "CostTally", share: float = 1.0) -> None:
        """Adds `other`, with FLOPs and bytes multiplied by `share`, such as a loop's trip count. Nodes count once."""
        self.unknown += other.unknown
        self.folded_bytes += other.folded_bytes
        self.largest_convolution_bytes = max(self.largest_convolution_bytes, other.largest_convolution_bytes)
        for key, kernel in other.kernels.items() if share else ():
            self.kernels.setdefault(key, KernelSum()).add(kernel, share)
        for name, cost in other.costs.items():
            mine = self.costs.setdefault(name, Cost())
            mine.nodes += cost.nodes
            mine.flops += cost.flops * share
            mine.bytes += cost.bytes * share


@dataclass(frozen=True, slots=True)
class GraphRun:
    """The result of running a graph, or one node."""

    # Values of the results, in order.
    outputs: tuple[Value, ...]
    # Peak of live bytes, without weights.
    peak_bytes: int
    # Costs of all nodes that ran.
    tally: CostTally
    # What the run takes of the runtime's arena; nothing of a body inside a node.
    arena: RunBytes = NOTHING


@dataclass(frozen=True, slots=True)
class GraphContext:
    """What every node of a body may refer to."""

    # Opset version by domain.
    opsets: Mapping[str, int]
    # The model's functions.
    functions: Mapping[FunctionKey, FunctionProto]
    # Attributes of the current function call, by the function's names; empty outside of functions.
    bindings: Mapping[str, AttributeProto] = field(default_factory=dict)


_NOT_FOLDED: Final = frozenset(
    {
        "DequantizeLinear", "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip
"""ONNX Runtime, core/optimizer/constant_folding.cc: the first stays, since kernels take quantized weights, the others
since they draw. Nor does it fold a node with a graph inside."""


def run_graph(
    graph: GraphProto, inputs: Mapping[str, Value], context: GraphContext, outer: TensorScope | None = None
) -> GraphRun:
    """Runs a graph once: nodes in the order of the file, which ONNX requires to be topological.

    A tensor lives from the node that makes it to the last node that reads it. Inputs and results live throughout,
    because the caller holds them. A view shares its input's memory. Reuse in place is not assumed. Raises nothing for a
    graph that has passed `check`.
    """
    scope: TensorScope = ChainMap({}, *(outer.maps if isinstance(outer, ChainMap) else ()))
    for tensor in graph.initializer:
        scope[tensor.name] = value_from_tensor(tensor)
    for sparse in graph.sparse_initializer:
        scope[sparse.values.name] = Value(sparse.values.data_type, tuple(sparse.dims))
    scope.update(inputs)
    declared = {info.name: value_from_type(info.type) for info in (*graph.value_info, *graph.output)}
    held_bytes = sum(value.nbytes or 0 for value in inputs.values())
    results = [info.name for info in graph.output]
    steps = list[Step]() if outer is None else None
    ran = _run(graph.node, scope, results, declared, context, held_bytes, steps)
    if steps is None:
        return ran
    given = {info.name: open_axes_of(info) for info in graph.input if info.name in inputs}
    tasks = tasks_of(steps, results, given)
    for task in tasks:
        if task.is_copy:
            ran.tally.add_copy(task.made[0].bytes)
    return replace(ran, arena=run_bytes(tasks, map(Tensor, results)))


def _run(
    nodes: Sequence[NodeProto],
    scope: TensorScope,
    results: Sequence[str],
    declared: Mapping[str, Value],
    context: GraphContext,
    held_bytes: int,
    steps: list[Step] | None = None,
) -> GraphRun:
    """Runs a body node by node and tracks live bytes. results: names of the body's outputs. declared: values that the
    file declares, used where inference fails. held_bytes: bytes that live throughout. steps: takes the nodes as they
    ran."""
    tally = CostTally()
    root, until = _lifetimes(nodes, results)
    ends: dict[int, list[str]] = {}
    for name, last in until.items():
        ends.setdefault(last, []).append(name)
    sizes: dict[str, int] = {}
    live = peak = held_bytes
    absorbed = absorbed_nodes(nodes, results)
    folding = _Folding()
    for index, node in enumerate(nodes):
        inputs = [scope.get(name, UNKNOWN) if name else UNKNOWN for name in node.input]
        ran = _step(_bind_attributes(node, context), inputs, scope, context, is_absorbed=index in absorbed)
        for name, value in zip(node.output, ran.outputs, strict=False):
            if not name:
                continue
            if value.shape is None:
                value = declared.get(name, value)
            if value.shape is None:
                ran.tally.unknown += 1
            scope[name] = value
            if root.get(name, name) == name and node.op_type != "Constant":
                sizes[name] = value.nbytes or 0
                live += sizes[name]
        tally.merge(ran.tally)
        tally.folded_bytes += folding.take(node, inputs, scope)
        peak = max(peak, live + ran.peak_bytes)
        if steps is not None:
            made = [scope.get(name, UNKNOWN) for name in node.output]  # a body may return fewer
            steps.append(Step(node, inputs, made, ran.peak_bytes, index in absorbed))
        for name in ends.get(index, ()):
            live -= sizes.pop(name, 0)
    return GraphRun(tuple(scope.get(name, UNKNOWN) for name in results), peak, tally)


class _Folding:
    """Which tensors of a body the runtime computes once, as it loads the model, and keeps as weights."""

    def __init__(self) -> None:
        # Bytes by name; without those that were counted.
        self._made: dict[str, int] = {}
        # Names of what it computes in every run, although it could be folded.
        self._kept: set[str] = set()

    def take(self, node: NodeProto, inputs: Sequence[Value], scope: TensorScope) -> int:
        """Bytes of those that the next node of the body reads for the first time, and that are not folded further."""
        if node.op_type == "Constant":
            return 0
        given = set(input_names(node))  # those of graphs inside it too
        is_constant = bool(given) and all(
            value.constant for name, value in zip(node.input, inputs, strict=True) if name
        )
        is_run = not is_constant or node.op_type in _NOT_FOLDED or any(subgraphs(node))
        if is_run or not self._kept.isdisjoint(given):
            self._kept.update(node.output)
            return sum(self._made.pop(name, 0) for name in given)
        self._made.update({name: scope[name].nbytes or 0 for name in node.output if name in scope})
        return 0


def _step(
    node: NodeProto, inputs: Sequence[Value], scope: TensorScope, context: GraphContext, *, is_absorbed: bool
) -> GraphRun:
    """Runs one node: its outputs' values, the bytes that live inside it while it runs, and its costs. is_absorbed: the
    kernel of an earlier node computes it."""
    function = context.functions.get(function_key(node))
    if function is not None:
        return _call(node, function, inputs, context)
    if not domain_of(node):
        match node.op_type:
            case "If":
                return _if(node, inputs, scope, context)
            case "Loop":
                return _loop(node, inputs, scope, context)
            case "Scan":
                return _scan(node, inputs, scope, context)
            case "Constant":
                return GraphRun(infer(node, inputs, context.opsets), 0, CostTally())
    outputs = infer(node, inputs, context.opsets)
    site = NodeSite(node, inputs, outputs)
    work = flops(site)
    traffic, whole = memory_traffic(site)
    tally = CostTally()
    tally.add(operator_name(node), flops=work or 0.0, traffic=traffic)
    tally.unknown += work is None or not whole
    if node.input and all(value.constant for name, value in zip(node.input, inputs, strict=True) if name):
        outputs = tuple(replace(value, constant=True) for value in outputs)  # folded as the model is loaded
    elif not is_absorbed:
        tally.add_kernel(site, work or 0.0, traffic)
    return GraphRun(outputs, 0, tally)


def _call(node: NodeProto, function: FunctionProto, inputs: Sequence[Value], context: GraphContext) -> GraphRun:
    """Runs a function's body, in its own scope and opsets, with the attributes of the call."""
    bindings = {attribute.name: attribute for attribute in function.attribute_proto}
    bindings.update({attribute.name: attribute for attribute in node.attribute})
    inner = GraphContext(opsets_of(function.opset_import), context.functions, bindings)
    scope: TensorScope = ChainMap(dict(zip(function.input, inputs, strict=False)))
    declared = {info.name: value_from_type(info.type) for info in function.value_info}
    ran = _run(function.node, scope, function.output, declared, inner, 0)
    return GraphRun(ran.outputs, _inner_peak(ran), ran.tally)


def _if(node: NodeProto, inputs: Sequence[Value], scope: TensorScope, context: GraphContext) -> GraphRun:
    """The branch that a known condition selects, else the more expensive one. The operators of the other branch are
    listed at no cost."""
    graphs = attributes_of(node)
    branches = [run_graph(graphs[name], {}, context, scope) for name in ("then_branch", "else_branch")]
    condition = inputs[0].data
    if condition is not None and condition.size == 1:
        first = bool(condition.reshape(-1)[0])
    else:
        first = branches[0].tally.flops >= branches[1].tally.flops
    taken, other = branches if first else reversed(branches)
    tally = CostTally()
    tally.add("If")
    tally.merge(taken.tally)
    other.tally.unknown = 0
    tally.merge(other.tally, 0.0)
    return GraphRun(taken.outputs, _inner_peak(taken), tally)


def _loop(node: NodeProto, inputs: Sequence[Value], scope: TensorScope, context: GraphContext) -> GraphRun:
    """The body's cost for every trip where the trip count is constant; else once, as a lower bound."""
    body: GraphProto = attributes_of(node)["body"]
    limit = inputs[0].data if inputs else None
    trips = max(0, int(limit.reshape(-1)[0])) if limit is not None and limit.size == 1 else None
    state = inputs[2:]
    given = [Value(7, ()), Value(9, ()), *(Value(value.dtype, value.shape) for value in state)]
    ran = run_graph(body, _bind_inputs(body, given), context, scope)
    states, scans = ran.outputs[1 : 1 + len(state)], ran.outputs[1 + len(state) :]
    outputs = (*(Value(value.dtype, value.shape) for value in states), *(_stack(value, trips, 0) for value in scans))
    tally = CostTally()
    tally.add("Loop")
    tally.merge(ran.tally, 1 if trips is None else float(trips))
    tally.unknown += trips is None or any(a.shape != b.shape for a, b in zip(states, state, strict=False))
    return GraphRun(outputs, _inner_peak(ran), tally)


def _scan(node: NodeProto, inputs: Sequence[Value], scope: TensorScope, context: GraphContext) -> GraphRun:
    """The body's cost for every slice of the scanned inputs; up to opset 8 for every slice of every batch."""
    attributes = attributes_of(node)
    body, count = attributes["body"], int(attributes["num_scan_inputs"])
    batched = context.opsets.get("", 1) <= _SCAN_BATCHED
    if batched:  # sequence_lens is first, and the first axis of everything else is the batch
        inputs = inputs[1:]
    batches = {value.shape[0] for value in inputs if value.shape} if batched else {1}
    batch = batches.pop() if len(batches) == 1 else None
    given = [_drop_axis(value, 0) for value in inputs] if batched else inputs
    state, scanned = given[: len(given) - count], given[len(given) - count :]
    axes = [0] * count if batched else attributes.get("scan_input_axes", [0] * count)
    lengths = {
        value.shape[axis] for value, axis in zip(scanned, axes, strict=False) if _has_axis(value, axis) and value.shape
    }
    trips = lengths.pop() if len(lengths) == 1 else None
    slices = [_drop_axis(value, axis) for value, axis in zip(scanned, axes, strict=False)]
    ran = run_graph(body, _bind_inputs(body, [*(Value(v.dtype, v.shape) for v in state), *slices]), context, scope)
    states, scans = ran.outputs[: len(state)], ran.outputs[len(state) :]
    out_axes = [0] * len(scans) if batched else attributes.get("scan_output_axes", [0] * len(scans))
    outputs = (*states, *(_stack(value, trips, axis) for value, axis in zip(scans, out_axes, strict=False)))
    if batched:
        outputs = tuple(_stack(value, batch, 0) for value in outputs)
    known = trips is not None and batch is not None
    tally = CostTally()
    tally.add("Scan")
    tally.merge(ran.tally, float((trips or 0) * (batch or 0)) if known else 1)
    tally.unknown += not known
    return GraphRun(outputs, _inner_peak(ran), tally)


def _inner_peak(ran: GraphRun) -> int:
    """A body's peak without its results, which belong to the node that runs the body."""
    return max(0, ran.peak_bytes - sum(value.nbytes or 0 for value in ran.outputs))


def _bind_inputs(body: GraphProto, values: Iterable[Value]) -> dict[str, Value]:
    return {info.name: value for info, value in zip(body.input, values, strict=False)}


def _has_axis(value: Value, axis: int) -> bool:
    return value.shape is not None and -len(value.shape) <= axis < len(value.shape)


def _drop_axis(value: Value, axis: int) -> Value:
    """The value of one slice along `axis`."""
    if value.shape is None or not _has_axis(value, axis):
        return Value(value.dtype)
    axis %= len(value.shape)
    return Value(value.dtype, value.shape[:axis] + value.shape[axis + 1 :])


def _stack(value: Value, trips: int | None, axis: int) -> Value:
    """The value of `trips` slices stacked along `axis`; its shape is unknown where `trips` is None."""
    if value.shape is None or trips is None:
        return Value(value.dtype)
    at = axis % (len(value.shape) + 1)
    return Value(value.dtype, (*value.shape[:at], trips, *value.shape[at:]))


def _bind_attributes(node: NodeProto, context: GraphContext) -> NodeProto:
    """The node with references to the function's attributes replaced by the values of the call. An attribute that the
    call does not give is left out."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    bound = NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        given = context.bindings.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if given is not None:
            copy = bound.attribute.add()
            copy.CopyFrom(given)
            copy.name = attribute.name
    return bound


def _lifetimes(nodes: Sequence[NodeProto], results: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """(view -> tensor whose memory it shares, tensor -> index of the last node that needs its memory)."""
    root: dict[str, str] = {}
    until: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in input_names(node):
            until[root.get(name, name)] = index
        for name in node.output:
            if node.op_type in VIEWS and not node.domain and node.input and name == node.output[0]:
                root[name] = root.get(node.input[0], node.input[0])
                until[root[name]] = index
            else:
                until.setdefault(name, index)
    for name in results:
        until[root.get(name, name)] = len(nodes)
    return root, until
