"""Whether an untrusted model is admitted, decided before anything is allocated according to its claims.

ONNX's own checker is not used: it checks conformance to ONNX, and passing it proves nothing about safety.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

from shoal.coordinator.core.graph.contents import (
    domain_of,
    every_body,
    every_node,
    every_tensor,
    function_key,
    operator_name,
    opsets_of,
    subgraphs,
)
from shoal.coordinator.core.graph.functions import function_problems
from shoal.coordinator.core.graph.infer import MICROSOFT, schema_of
from shoal.coordinator.core.graph.rules import Rules
from shoal.coordinator.core.graph.tensors import tensor_problems
from shoal.coordinator.core.graph.values import OIP
from shoal.types.codes import Code, Refusal

_LONGEST_NAME: Final = 512
MOST_TENSORS: Final = 1_024
MOST_NAMES: Final = 64 * 1024
"""Inputs, or outputs, of a model: as many as a request may name, and characters of their names. A node's status tells
the signature of each replica; one that is longer than a message may be is refused whole, for all its replicas."""
_LARGEST: Final = 2**63 - 1

_FOREIGN_CODE: Final = frozenset(
    {"EPContext", "PythonOp", "PythonOpGrad", "Snpe", "TritonOp", "ATen", "ExternalGradient"}
)
"""com.microsoft operators that carry or name third-party compiled code instead of a definition."""

_OPTIONS: Final = (
    "ort_config", "ort.", "session.", "session_", "ep.", "ep_compatibility_info", "optimization.", "mlas.", "memory.",
    "custom_op", "customop", "execution_provider", "provider_options",
)  # fmt: skip
"""Prefixes of metadata that a runtime may interpret as its options: ONNX Runtime reads a session's options from
`ort_config`."""

_REQUIRED_GRAPHS: Final = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def check(model: ModelProto, digest: str, rules: Rules) -> Refusal | None:
    """The first problem of the model; None if it is admitted. The order matters, because later checks rely on earlier
    ones."""
    trusted = digest in rules.trusted_digests
    problems = chain(
        _form(model),
        _nesting(model, rules),
        (problem for tensor in every_tensor(model) for problem in tensor_problems(tensor, rules)),
        function_problems(model, rules),
        _operators(model, rules, trusted),
        () if trusted else _metadata(model),
        _interface(model),
        _names(model),
    )
    return next(problems, None)


def _form(model: ModelProto) -> Iterator[Refusal]:
    if not model.HasField("graph") or not model.graph.node:
        yield _invalid("no graph", "a model with at least one node")
    if not model.opset_import:
        yield _invalid("no operator set imported", "an opset_import")
    if any(entry.version < 1 for entry in model.opset_import):
        yield _invalid("an operator set of version below 1", "a released version")
    if model.training_info:
        yield _invalid("training information", "a model for inference")


def _nesting(model: ModelProto, rules: Rules) -> Iterator[Refusal]:
    for _, depth in every_body(model):
        if depth > rules.max_subgraph_depth:
            yield _invalid(f"subgraphs nested {depth} deep", f"at most {rules.max_subgraph_depth}")


def _operators(model: ModelProto, rules: Rules, trusted: bool) -> Iterator[Refusal]:
    own = {function_key(function) for function in model.functions}
    opsets = opsets_of(chain(model.opset_import, *(function.opset_import for function in model.functions)))
    for node in every_node(model):
        domain = domain_of(node)
        if function_key(node) in own:
            continue
        foreign = domain == MICROSOFT and node.op_type in _FOREIGN_CODE
        if foreign and _names_a_file(node):
            yield Refusal(
                Code.MODEL_PATH,
                f"{operator_name(node)} names a file beside the model",
                "one file with everything inside",
                "compile it with ep.context_embed_mode 1, or push the model it was compiled from",
            )
        if (foreign or domain not in rules.domains) and not trusted:
            yield Refusal(
                Code.CUSTOM_OP_DENIED,
                f"operator {operator_name(node)!r:.120}",
                f"operators of {', '.join(sorted(rules.domains - {''}))}, or functions within the model",
                "export it without custom operators, or let the region's operator trust this digest",
            )
        if domain in ("", "ai.onnx.ml") and schema_of(node.op_type, opsets.get(domain, 1), domain) is None:
            yield _invalid(f"operator {operator_name(node)!r:.120}", f"operators of opset {opsets.get(domain, 1)}")
        given = {attribute.name for attribute in node.attribute if attribute.HasField("g") or attribute.ref_attr_name}
        if not domain and not given.issuperset(_REQUIRED_GRAPHS.get(node.op_type, ())):
            yield _invalid(f"{node.op_type} without its body", "a graph in its attributes")


def _names_a_file(node: NodeProto) -> bool:
    """For EPContext: embed_mode 1 (the default) carries the context's bytes, embed_mode 0 a path to them."""
    return any(attribute.name == "embed_mode" and attribute.i == 0 for attribute in node.attribute)


def _metadata(model: ModelProto) -> Iterator[Refusal]:
    for entry in chain(model.metadata_props, model.graph.metadata_props):
        if entry.key.strip().lower().startswith(_OPTIONS):
            yield Refusal(
                Code.CUSTOM_OP_DENIED,
                f"metadata {entry.key!r:.80} looks like an option of a runtime",
                "metadata that describes the model",
                "remove the entry from metadata_props, or let the region's operator trust this digest",
            )


def _interface(model: ModelProto) -> Iterator[Refusal]:
    """Inputs and outputs must be types that the inference protocol can carry, with printable names."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in stored]
    for side, infos in (("input", inputs), ("output", list(model.graph.output))):
        characters = sum(len(info.name) for info in infos)
        if len(infos) > MOST_TENSORS or characters > MOST_NAMES:
            yield _invalid(
                f"{len(infos)} {side}s, whose names have {characters} characters",
                f"at most {MOST_TENSORS}, with {MOST_NAMES} characters in all",
            )
            return
        if len({info.name for info in infos}) < len(infos):
            yield _invalid(f"two {side}s of one name", f"each {side} once")
        for info in infos:
            yield from _tensor(side, info)
    if not model.graph.output:
        yield _invalid("no output", "at least one output")


def _tensor(side: str, info: ValueInfoProto) -> Iterator[Refusal]:
    name = f"{side} {info.name!r:.80}"
    if not info.name or len(info.name) > _LONGEST_NAME or not info.name.isprintable():
        yield _invalid(name, f"a printable name of at most {_LONGEST_NAME} characters")
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type" or info.type.tensor_type.elem_type not in OIP:
        yield _invalid(
            f"{name} is {'of an element type' if kind == 'tensor_type' else 'a ' + str(kind).removesuffix('_type')} "
            "that the inference protocol cannot carry",
            f"tensors of {', '.join(sorted(OIP.values()))}",
            "export the model with plain tensors (scikit-learn: zipmap=False)",
        )
        return
    lengths = [dim.dim_value for dim in info.type.tensor_type.shape.dim if dim.HasField("dim_value")]
    size = 1
    for length in lengths:
        size *= length or 1
    if any(length < -1 for length in lengths) or abs(size) > _LARGEST // 16 or len(lengths) > 64:
        yield _invalid(f"{name} of {lengths[:8]}", "lengths from 0, a product below 2^59, -1 for an open axis")


def _names(model: ModelProto) -> Iterator[Refusal]:
    """Every name must be defined once and before it is read. ONNX demands it, and every walk over the graph relies on
    it."""
    yield from _names_in(model.graph, [])
    for function in model.functions:
        yield from _order(function.node, [set(function.input)], function.output)


def _names_in(graph: GraphProto, outer: list[set[str]]) -> Iterator[Refusal]:
    mine = {tensor.name for tensor in graph.initializer} | {info.name for info in graph.input}
    mine.update(sparse.values.name for sparse in graph.sparse_initializer)
    yield from _order(graph.node, [*outer, mine], [info.name for info in graph.output])


def _order(nodes: Iterable[NodeProto], scopes: list[set[str]], results: Iterable[str]) -> Iterator[Refusal]:
    """Checks that each node reads only names of an enclosing scope or of earlier nodes, and defines new names. The last
    of `scopes` is the body's own; it grows with each node."""
    mine = scopes[-1]
    for node in nodes:
        for name in node.input:
            if name and not any(name in scope for scope in scopes):
                yield _invalid(
                    f"{node.op_type!r:.60} reads {name!r:.80}, which nothing before it makes", "nodes in order"
                )
        for graph in subgraphs(node):
            yield from _names_in(graph, scopes)
        for name in node.output:
            if name and name in mine:
                yield _invalid(f"{name!r:.80} is made twice", "each name once")
            mine.add(name)
    for name in results:
        if not any(name in scope for scope in scopes):
            yield _invalid(f"result {name!r:.80}, which nothing makes", "results that the graph makes")


def _invalid(found: str, asked: str, remedy: str = "export the model again") -> Refusal:
    return Refusal(Code.MODEL_INVALID, found, asked, remedy)
