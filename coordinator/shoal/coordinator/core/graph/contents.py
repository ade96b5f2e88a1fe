"""Iterates over everything that a model contains at any depth (graphs, nodes, tensors), without recursion."""

from collections.abc import Iterable, Iterator

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
)

Body = GraphProto | FunctionProto
FunctionKey = tuple[str, str, str]


def every_body(model: ModelProto) -> Iterator[tuple[Body, int]]:
    """Pairs of (main graph, function or subgraph; number of subgraphs that enclose it)."""
    stack: list[tuple[Body, int]] = [(model.graph, 0), *((function, 0) for function in model.functions)]
    while stack:
        body, depth = stack.pop()
        yield body, depth
        stack += [(graph, depth + 1) for attribute in attributes(body) for graph in graphs_of(attribute)]


def every_node(model: ModelProto) -> Iterator[NodeProto]:
    for body, _ in every_body(model):
        yield from body.node


def every_tensor(model: ModelProto) -> Iterator[TensorProto | SparseTensorProto]:
    """Initializers, and constants in attributes. A sparse tensor is yielded whole, not its parts."""
    for body, _ in every_body(model):
        if isinstance(body, GraphProto):
            yield from body.initializer
            yield from body.sparse_initializer
        for attribute in attributes(body):
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor
            yield from attribute.sparse_tensors


def attributes(body: Body) -> Iterator[AttributeProto]:
    """Attributes of the body's own nodes, and a function's attribute defaults."""
    if isinstance(body, FunctionProto):
        yield from body.attribute_proto
    for node in body.node:
        yield from node.attribute


def graphs_of(attribute: AttributeProto) -> Iterable[GraphProto]:
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        yield from graphs_of(attribute)


def input_names(node: NodeProto) -> Iterator[str]:
    """Names that the node reads, including those that its subgraphs read."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from input_names(inner)
        yield from (info.name for info in graph.output)


def opsets_of(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Domain -> version; the higher version where a domain is imported twice."""
    found: dict[str, int] = {}
    for entry in imports:
        domain = domain_of(entry)
        found[domain] = max(entry.version, found.get(domain, entry.version))
    return found


def domain_of(named: NodeProto | FunctionProto | OperatorSetIdProto) -> str:
    """The domain, with `ai.onnx` as the empty string: it is the default domain's full name."""
    return "" if named.domain == "ai.onnx" else named.domain


def function_key(named: NodeProto | FunctionProto) -> FunctionKey:
    """The key by which a node calls a function."""
    name = named.op_type if isinstance(named, NodeProto) else named.name
    return domain_of(named), name, named.overload


def operator_name(node: NodeProto) -> str:
    """The name with its domain: `Conv`, `com.microsoft:FusedMatMul`."""
    domain = domain_of(node)
    return f"{domain}:{node.op_type}" if domain else node.op_type
