from collections.abc import Iterator

from onnx import FunctionProto, GraphProto, ModelProto

from shoal.coordinator.core.graph.rules import Rules
from shoal.coordinator.core.graph.walk import subgraphs
from shoal.types.codes import Refusal


def parse(content: bytes, rules: Rules) -> ModelProto | Refusal:
    return ModelProto.FromString(content)


def check(model: ModelProto, digest: str, rules: Rules) -> Refusal | None:
    return None


def every_graph(model: ModelProto) -> Iterator[GraphProto | FunctionProto]:
    """The main graph, its subgraphs, and the functions with theirs."""
    stack: list[GraphProto | FunctionProto] = [model.graph, *model.functions]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack.extend(subgraphs(node))
