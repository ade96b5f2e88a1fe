"""Computes a model's profile from its bytes."""

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from onnx import GraphProto, ModelProto, ValueInfoProto, defs

from shoal.coordinator.core.graph.bounds import index_bounds
from shoal.coordinator.core.graph.check import check
from shoal.coordinator.core.graph.contents import (
    domain_of,
    every_body,
    every_node,
    function_key,
    operator_name,
    opsets_of,
    subgraphs,
)
from shoal.coordinator.core.graph.infer import attributes_of, schema_of
from shoal.coordinator.core.graph.operands import operands
from shoal.coordinator.core.graph.reference import SCHEMES, Shapes, axes_of, check_shapes, reference_inputs
from shoal.coordinator.core.graph.rules import RULES, Rules
from shoal.coordinator.core.graph.scan import scan
from shoal.coordinator.core.graph.values import OIP, PRECISION, Value, value_from_constant
from shoal.coordinator.core.graph.walk import GraphContext, GraphRun, run_graph
from shoal.types.codes import Code, Refusal
from shoal.types.profile import PROFILE_VERSION, RUN_BATCHES, KernelCost, ModelProfile, OperatorCost, TensorSpec
from shoal.types.units import Bytes, show_bytes

_INTEGERS: Final = frozenset(dtype for dtype, name in OIP.items() if name.startswith(("INT", "UINT")))
_NEVER_RUN: Final = frozenset({"Constant", "Dropout"})
"""In any version: ONNX Runtime removes them from a graph before it selects kernels (core/optimizer, constant_folding.cc
and dropout_elimination.cc)."""
_PACKED: Final = frozenset({"MatMul", "Gemm", "LSTM", "GRU"})
"""ONNX Runtime's own provider orders their weights anew before the first run (`OpKernel::PrePack`). It frees a weight
once all its uses are done, and a node that has a graph inside counts as one. Found with 1.32: eight matrices of 1 MiB
that a Loop multiplies by took 7 MiB more at the peak than in the main graph, and none where nothing was ordered. Two
graphs deep it does not order them."""
METADATA_VALUE: Final = 4096
METADATA_ENTRIES: Final = 64
"""Metadata beyond these limits (a vocabulary, a licence text) stays in the model but not in its profile."""


def profile_of(
    content: bytes, digest: str, rules: Rules = RULES, shapes: Shapes | None = None
) -> ModelProfile | Refusal:
    """What the model of these bytes demands of a device, or why it is refused.

    content: the whole file. digest: `sha256:<hex>` of it, already verified by the caller. It is copied into the profile
    and decides whether `rules` trusts the model's custom operators. shapes: of inputs, to count at; others are chosen.
    Nothing in the model is executed, and no file that it names is opened.
    """
    refusal = scan(content, rules)
    if refusal is not None:
        return refusal
    model = ModelProto.FromString(content)
    return check(model, digest, rules) or _profile(model, digest, len(content), rules, shapes or {})


def _profile(model: ModelProto, digest: str, size: int, rules: Rules, shapes: Shapes) -> ModelProfile | Refusal:
    constants = {tensor.name for tensor in model.graph.initializer}
    given = [info for info in model.graph.input if info.name not in constants]
    if (misfit := check_shapes(given, shapes)) is not None:
        return misfit
    opsets = opsets_of(model.opset_import)
    context = GraphContext(opsets, {function_key(function): function for function in model.functions})
    inputs, ran = _run_best_scheme(model.graph, given, context, shapes)
    # What a kernel takes while it runs is no tensor.
    held = max(ran.peak_bytes, ran.arena.one_bytes)
    if held > rules.max_activation_bytes:
        return Refusal(
            Code.MODEL_INVALID,
            f"one run at {_shapes(inputs)} holds {show_bytes(Bytes(held))} of tensors at once",
            f"at most {show_bytes(rules.max_activation_bytes)}",
            "a constant in the graph asks for a tensor of absurd size: export the model again, or raise the limit",
        )
    each_weight = list(_weights(model))
    weights = Counter[int]()
    for each in each_weight:
        weights[each.dtype] += each.bytes
    input_bytes = sum(value.nbytes or 0 for value in inputs.values())
    return ModelProfile(
        digest=digest,
        size_bytes=Bytes(size),
        ir_version=model.ir_version,
        opset=opsets.get("", 0),
        domains=_domains(model, opsets),
        producer=" ".join(part for part in (model.producer_name, model.producer_version) if part),
        precision=_precision(weights, given),
        inputs=tuple(_spec(info, inputs[info.name]) for info in given),
        outputs=tuple(_spec(info, value) for info, value in zip(model.graph.output, ran.outputs, strict=True)),
        reference_shapes={name: value.shape for name, value in inputs.items() if value.shape is not None},
        costs=tuple(
            OperatorCost(name, cost.nodes, cost.flops, cost.bytes) for name, cost in sorted(ran.tally.costs.items())
        ),
        weight_bytes=Bytes(sum(weights.values())),
        activation_bytes=Bytes(ran.peak_bytes),
        confident=ran.tally.unknown == 0,
        metadata=_metadata(model),
        below=index_bounds(model.graph, [info.name for info in given if info.type.tensor_type.elem_type in _INTEGERS]),
        definitions=_definitions(model),
        operands=operands(model.graph, inputs),
        kernels=tuple(
            KernelCost(kind, cost.launches, cost.flops, cost.bytes, cost.weight_bytes, _known(cost.padding_flops))
            for (kind, _), cost in sorted(ran.tally.kernels.items())
        ),
        largest_weight_bytes=Bytes(max((each.bytes for each in each_weight), default=0)),
        run_bytes=Bytes(input_bytes + ran.arena.one_bytes),
        run_growth_bytes=Bytes(input_bytes + ran.arena.growth_bytes),
        largest_convolution_bytes=Bytes(ran.tally.largest_convolution_bytes),
        layout_copies=ran.tally.layout_copies,
        layout_bytes=Bytes(ran.tally.layout_bytes),
        version=PROFILE_VERSION,
        batch_run_bytes=tuple(
            Bytes(count * input_bytes + taken) for count, taken in zip(RUN_BATCHES, ran.arena.batch_bytes, strict=True)
        ),
        copied_bytes=Bytes(sum(each.bytes * each.copies for each in each_weight)),
        inner_packed_bytes=Bytes(_inner_packed_bytes(model)),
        folded_bytes=Bytes(ran.tally.folded_bytes),
    )


def _known(figures: tuple[float, ...]) -> tuple[float, ...]:
    """Empty where all are 0."""
    return figures if any(figures) else ()


def _run_best_scheme(
    graph: GraphProto, given: list[ValueInfoProto], context: GraphContext, shapes: Shapes
) -> tuple[dict[str, Value], GraphRun]:
    """The first scheme of input sizes under which every shape can be inferred; else the one with the fewest unknown
    costs."""
    best: tuple[dict[str, Value], GraphRun] | None = None
    tried: list[dict[str, Value]] = []
    for scheme in SCHEMES:
        inputs = reference_inputs(given, scheme, shapes)
        if inputs in tried:
            continue
        tried.append(inputs)
        ran = run_graph(graph, inputs, context)
        if best is None or ran.tally.unknown < best[1].tally.unknown:
            best = inputs, ran
        if ran.tally.unknown == 0:
            break
    assert best is not None
    return best


def _shapes(inputs: dict[str, Value]) -> str:
    return ", ".join(f"{name} {list(value.shape or ())}" for name, value in list(inputs.items())[:4]) or "no inputs"


def _spec(info: ValueInfoProto, value: Value) -> TensorSpec:
    """The tensor as declared. Where not even its rank is declared, the rank is inferred and all axes are open."""
    axes = axes_of(info) if info.type.tensor_type.HasField("shape") else (-1,) * len(value.shape or ())
    return TensorSpec(info.name, OIP[info.type.tensor_type.elem_type], axes)


def _domains(model: ModelProto, opsets: dict[str, int]) -> dict[str, int]:
    """Opset version of each domain that a node uses; `ai.onnx` for the default one."""
    used = {domain_of(node) for node in every_node(model)}
    return {domain or "ai.onnx": opsets.get(domain, 1) for domain in sorted(used)}


def _definitions(model: ModelProto) -> dict[str, int]:
    """Versions of the operators' definitions by operator name. An operator that two bodies use from different opsets is
    left out, because one number cannot describe both."""
    own = {function_key(function) for function in model.functions}
    roots = [(model.graph.node, opsets_of(model.opset_import))]
    roots += [(function.node, opsets_of(function.opset_import)) for function in model.functions]
    found: dict[str, set[int]] = {}
    for nodes, opsets in roots:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            stack += [inner for graph in subgraphs(node) for inner in graph.node]
            domain = domain_of(node)
            if domain not in ("", "ai.onnx.ml") or function_key(node) in own or node.op_type in _NEVER_RUN:
                continue
            schema = schema_of(node.op_type, opsets.get(domain, 1), domain)
            if schema is not None and not _is_composite(schema):
                found.setdefault(operator_name(node), set()).add(schema.since_version)
    return {name: versions.pop() for name, versions in sorted(found.items()) if len(versions) == 1}


def _is_composite(schema: defs.OpSchema) -> bool:
    """Whether the operator is defined as a function. The stubs of `onnx` lack these two attributes."""
    return bool(getattr(schema, "has_function", False) or getattr(schema, "has_context_dependent_function", False))


class _Weight(NamedTuple):
    """A constant."""

    # Its element type.
    dtype: int
    bytes: int
    # How often the runtime copies it as a model is loaded, beyond what it does to an initializer of the main graph. It
    # turns Constant nodes into initializers; a graph inside a node is an attribute, which its node copies, and whose
    # graph is opened from one more copy. Found with ONNX Runtime 1.32 (`tests/unit/agent/worker/test_load_memory.py`).
    copies: int


def _weights(model: ModelProto) -> Iterator[_Weight]:
    """Initializers and Constant nodes of every graph and function."""
    for graph, depth in every_body(model):
        if isinstance(graph, GraphProto):
            for tensor in graph.initializer:
                yield _weight(Value(tensor.data_type, tuple(tensor.dims)), 2 * depth)
            for sparse in graph.sparse_initializer:
                yield _weight(Value(sparse.values.data_type, tuple(sparse.dims)), 2 * depth)
        for node in graph.node:
            if node.op_type == "Constant" and not domain_of(node):
                yield _weight(value_from_constant(attributes_of(node)), 2 * depth + 1)


def _inner_packed_bytes(model: ModelProto) -> int:
    """Of the graph inside a node that has most. A weight that two nodes of it use counts once."""
    outer = {name: value.nbytes or 0 for name, value in _constants(model.graph)}
    most = 0
    for graph, depth in every_body(model):
        if depth != 1 or not isinstance(graph, GraphProto):
            continue
        own = {name for name, _ in _constants(graph)}
        used = {name for node in graph.node if node.op_type in _PACKED for name in node.input}
        most = max(most, sum(outer[name] for name in used - own if name in outer))
    return most


def _constants(graph: GraphProto) -> Iterator[tuple[str, Value]]:
    """Dense initializers and Constant nodes of this very graph, by name."""
    for tensor in graph.initializer:
        yield tensor.name, Value(tensor.data_type, tuple(tensor.dims))
    for node in graph.node:
        if node.op_type == "Constant" and not domain_of(node) and node.output:
            yield node.output[0], value_from_constant(attributes_of(node))


def _weight(value: Value, copies: int) -> _Weight:
    return _Weight(value.dtype, value.nbytes or 0, copies)


def _precision(weights: Counter[int], given: list[ValueInfoProto]) -> str:
    """The element type of most weight bytes. Without weights: that of the first numeric input, else fp32."""
    by_name: Counter[str] = Counter()
    for dtype, size in weights.items():
        if dtype in PRECISION:
            by_name[PRECISION[dtype]] += size
    if by_name.total():
        return min(by_name, key=lambda name: (-by_name[name], name))
    return next((PRECISION[t] for t in (i.type.tensor_type.elem_type for i in given) if t in PRECISION), "fp32")


def _metadata(model: ModelProto) -> dict[str, str]:
    """Metadata entries without NUL, within the limits on length and number."""
    short = ((entry.key, entry.value) for entry in model.metadata_props)
    fitting = [(k, v) for k, v in short if len(k) <= METADATA_VALUE and len(v) <= METADATA_VALUE and "\0" not in k + v]
    return dict(fitting[:METADATA_ENTRIES])
