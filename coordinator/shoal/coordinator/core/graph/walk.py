"""A graph run on shapes instead of tensors: what each operator costs and how many bytes live at once."""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from shoal.coordinator.core.graph.contents import (
    FunctionKey,
    domain_of,
    function_key,
    operator_name,
    opsets_of,
    subgraphs,
)
from shoal.coordinator.core.graph.flops import VIEWS, Site, flops, moved
from shoal.coordinator.core.graph.infer import attributes_of, infer
from shoal.coordinator.core.graph.values import UNKNOWN, Value, of_tensor, of_type

Scope = MutableMapping[str, Value]


@dataclass(slots=True)
class Cost:
    nodes: int = 0
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class Tally:
    """Costs by operator name (`Conv`, `com.microsoft:FusedMatMul`). unknown: nodes whose cost is a lower bound."""

    costs: dict[str, Cost] = field(default_factory=dict)
    unknown: int = 0

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs.values())

    def add(self, name: str, *, flops: float = 0.0, moved: float = 0.0) -> None:
        cost = self.costs.setdefault(name, Cost())
        cost.nodes, cost.flops, cost.bytes = cost.nodes + 1, cost.flops + flops, cost.bytes + moved

    def merge(self, other: "Tally", share: float = 1.0) -> None:
        self.unknown += other.unknown
        for name, cost in other.costs.items():
            mine = self.costs.setdefault(name, Cost())
            mine.nodes += cost.nodes
            mine.flops += cost.flops * share
            mine.bytes += cost.bytes * share


@dataclass(frozen=True, slots=True)
class Ran:
    """outputs: the graph's results in order. peak_bytes: most bytes that live at once, weights left out."""

    outputs: tuple[Value, ...]
    peak_bytes: int
    tally: Tally


@dataclass(frozen=True, slots=True)
class World:
    """What every node of a body may refer to. bindings: a function call's attributes, by the function's names."""

    opsets: Mapping[str, int]
    functions: Mapping[FunctionKey, FunctionProto]
    bindings: Mapping[str, AttributeProto] = field(default_factory=dict)


def run_graph(graph: GraphProto, inputs: Mapping[str, Value], world: World, outer: Scope | None = None) -> Ran:
    """One run of a graph: nodes in the order of the file, which ONNX demands to be topological.

    A tensor lives from the node that makes it to the last that reads it; inputs and results live throughout, since the
    caller holds them; a view lives in its input's memory; reuse in place is not assumed. Raises nothing on any graph
    that has passed `check`.
    """
    scope: Scope = ChainMap({}, *(outer.maps if isinstance(outer, ChainMap) else ()))
    for tensor in graph.initializer:
        scope[tensor.name] = of_tensor(tensor)
    for sparse in graph.sparse_initializer:
        scope[sparse.values.name] = Value(sparse.values.data_type, tuple(sparse.dims))
    scope.update(inputs)
    declared = {info.name: of_type(info.type) for info in (*graph.value_info, *graph.output)}
    held = sum(value.nbytes or 0 for value in inputs.values())
    return _run(graph.node, scope, [info.name for info in graph.output], declared, world, held)


def _run(
    nodes: Sequence[NodeProto],
    scope: Scope,
    results: Sequence[str],
    declared: Mapping[str, Value],
    world: World,
    held: int,
) -> Ran:
    tally = Tally()
    root, until = _lifetimes(nodes, results)
    ends: dict[int, list[str]] = {}
    for name, last in until.items():
        ends.setdefault(last, []).append(name)
    sizes: dict[str, int] = {}
    live = peak = held
    for index, node in enumerate(nodes):
        inputs = [scope.get(name, UNKNOWN) if name else UNKNOWN for name in node.input]
        ran = _step(_bound(node, world), inputs, scope, world)
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
        peak = max(peak, live + ran.peak_bytes)
        for name in ends.get(index, ()):
            live -= sizes.pop(name, 0)
    return Ran(tuple(scope.get(name, UNKNOWN) for name in results), peak, tally)


def _step(node: NodeProto, inputs: Sequence[Value], scope: Scope, world: World) -> Ran:
    """One node: its outputs' values, the bytes that live inside it while it runs, its costs."""
    function = world.functions.get(function_key(node))
    if function is not None:
        return _call(node, function, inputs, world)
    if not domain_of(node):
        match node.op_type:
            case "If":
                return _if(node, inputs, scope, world)
            case "Loop":
                return _loop(node, inputs, scope, world)
            case "Scan":
                return _scan(node, inputs, scope, world)
            case "Constant":
                return Ran(infer(node, inputs, world.opsets), 0, Tally())
    outputs = infer(node, inputs, world.opsets)
    site = Site(node, inputs, outputs)
    work = flops(site)
    traffic, whole = moved(site)
    tally = Tally()
    tally.add(operator_name(node), flops=work or 0.0, moved=traffic)
    tally.unknown += work is None or not whole
    return Ran(outputs, 0, tally)


def _call(node: NodeProto, function: FunctionProto, inputs: Sequence[Value], world: World) -> Ran:
    bindings = {attribute.name: attribute for attribute in function.attribute_proto}
    bindings.update({attribute.name: attribute for attribute in node.attribute})
    inner = World(opsets_of(function.opset_import), world.functions, bindings)
    scope: Scope = ChainMap(dict(zip(function.input, inputs, strict=False)))
    declared = {info.name: of_type(info.type) for info in function.value_info}
    ran = _run(function.node, scope, function.output, declared, inner, 0)
    return Ran(ran.outputs, _inner(ran), ran.tally)


def _if(node: NodeProto, inputs: Sequence[Value], scope: Scope, world: World) -> Ran:
    """The branch that a known condition takes, else the dearer one. The other is listed and costs nothing."""
    graphs = attributes_of(node)
    branches = [run_graph(graphs[name], {}, world, scope) for name in ("then_branch", "else_branch")]
    condition = inputs[0].data
    if condition is not None and condition.size == 1:
        first = bool(condition.reshape(-1)[0])
    else:
        first = branches[0].tally.flops >= branches[1].tally.flops
    taken, other = branches if first else reversed(branches)
    tally = Tally()
    tally.add("If")
    tally.merge(taken.tally)
    other.tally.unknown = 0
    tally.merge(other.tally, 0.0)
    return Ran(taken.outputs, _inner(taken), tally)


def _loop(node: NodeProto, inputs: Sequence[Value], scope: Scope, world: World) -> Ran:
    """The body's cost for every trip when the count is a constant, else once, as a lower bound."""
    body: GraphProto = attributes_of(node)["body"]
    limit = inputs[0].data if inputs else None
    trips = max(0, int(limit.reshape(-1)[0])) if limit is not None and limit.size == 1 else None
    state = inputs[2:]
    given = [Value(7, ()), Value(9, ()), *(Value(value.dtype, value.shape) for value in state)]
    ran = run_graph(body, _named(body, given), world, scope)
    states, scans = ran.outputs[1 : 1 + len(state)], ran.outputs[1 + len(state) :]
    outputs = (*(Value(value.dtype, value.shape) for value in states), *(_stacked(value, trips, 0) for value in scans))
    tally = Tally()
    tally.add("Loop")
    tally.merge(ran.tally, 1 if trips is None else float(trips))
    tally.unknown += trips is None or any(a.shape != b.shape for a, b in zip(states, state, strict=False))
    return Ran(outputs, _inner(ran), tally)


def _scan(node: NodeProto, inputs: Sequence[Value], scope: Scope, world: World) -> Ran:
    """The body's cost for every slice of the scanned inputs (opset 9 and later)."""
    attributes = attributes_of(node)
    body, count = attributes["body"], int(attributes["num_scan_inputs"])
    state, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    axes = attributes.get("scan_input_axes", [0] * count)
    lengths = {
        value.shape[axis] for value, axis in zip(scanned, axes, strict=False) if _has(value, axis) and value.shape
    }
    trips = lengths.pop() if len(lengths) == 1 and world.opsets.get("", 1) > 8 else None
    slices = [_without(value, axis) for value, axis in zip(scanned, axes, strict=False)]
    ran = run_graph(body, _named(body, [*(Value(v.dtype, v.shape) for v in state), *slices]), world, scope)
    states, scans = ran.outputs[: len(state)], ran.outputs[len(state) :]
    out_axes = attributes.get("scan_output_axes", [0] * len(scans))
    outputs = (*states, *(_stacked(value, trips, axis) for value, axis in zip(scans, out_axes, strict=False)))
    tally = Tally()
    tally.add("Scan")
    tally.merge(ran.tally, 1 if trips is None else float(trips))
    tally.unknown += trips is None
    return Ran(outputs, _inner(ran), tally)


def _inner(ran: Ran) -> int:
    """A body's peak beyond its results, which the node that runs it owns."""
    return max(0, ran.peak_bytes - sum(value.nbytes or 0 for value in ran.outputs))


def _named(body: GraphProto, values: Iterable[Value]) -> dict[str, Value]:
    return {info.name: value for info, value in zip(body.input, values, strict=False)}


def _has(value: Value, axis: int) -> bool:
    return value.shape is not None and -len(value.shape) <= axis < len(value.shape)


def _without(value: Value, axis: int) -> Value:
    if value.shape is None or not _has(value, axis):
        return Value(value.dtype)
    axis %= len(value.shape)
    return Value(value.dtype, value.shape[:axis] + value.shape[axis + 1 :])


def _stacked(value: Value, trips: int | None, axis: int) -> Value:
    if value.shape is None or trips is None:
        return Value(value.dtype)
    at = axis % (len(value.shape) + 1)
    return Value(value.dtype, (*value.shape[:at], trips, *value.shape[at:]))


def _bound(node: NodeProto, world: World) -> NodeProto:
    """The node with a function's attribute references replaced by what the call gave; one not given is left out."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    bound = NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        given = world.bindings.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if given is not None:
            copy = bound.attribute.add()
            copy.CopyFrom(given)
            copy.name = attribute.name
    return bound


def _lifetimes(nodes: Sequence[NodeProto], results: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """(view -> the tensor whose memory it shares, tensor -> index of the last node that needs its memory)."""
    root: dict[str, str] = {}
    until: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in reads(node):
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


def reads(node: NodeProto) -> Iterator[str]:
    """Names that the node needs, those of its subgraphs included."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from reads(inner)
        yield from (info.name for info in graph.output)
