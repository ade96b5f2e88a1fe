"""Checks the functions that a model defines: no recursion, and no more nodes than the limits allow after all calls are
expanded."""

from collections.abc import Iterable, Iterator, Mapping

from onnx import FunctionProto, ModelProto, NodeProto

from shoal.coordinator.core.graph.contents import FunctionKey, function_key, subgraphs
from shoal.coordinator.core.graph.rules import Rules
from shoal.types.codes import Code, Refusal


def function_problems(model: ModelProto, rules: Rules) -> Iterator[Refusal]:
    """Problems of the model's functions. Time is proportional to the nodes in the file, because each function's size
    and depth are computed once."""
    functions = {function_key(function): function for function in model.functions}
    if len(functions) < len(model.functions):
        yield _invalid("two functions of one name", "each function once")
        return
    order = _callees_first(functions)
    if order is None:
        yield _invalid("functions that call each other in a ring", "functions without recursion")
        return
    size: dict[FunctionKey, int] = {}
    depth: dict[FunctionKey, int] = {}
    for key in order:
        size[key], depth[key] = _extent(functions[key].node, size, depth)
        if depth[key] > rules.max_call_depth:
            yield _invalid(f"calls nested {depth[key]} deep", f"at most {rules.max_call_depth}")
            return
    total, _ = _extent(model.graph.node, size, depth)
    if total > rules.max_nodes:
        yield _invalid("too many nodes once every call is written out", f"at most {rules.max_nodes}")


def _extent(
    nodes: Iterable[NodeProto], size: Mapping[FunctionKey, int], depth: Mapping[FunctionKey, int]
) -> tuple[int, int]:
    """(nodes with every call expanded, levels of calls and subgraphs) of a body whose callees are known."""
    count, deepest = 0, 1
    stack = [(node, 1) for node in nodes]
    while stack:
        node, level = stack.pop()
        key = function_key(node)
        count += 1 + size.get(key, 0)
        deepest = max(deepest, level + depth.get(key, 0))
        stack += [(inner, level + 1) for graph in subgraphs(node) for inner in graph.node]
    return count, deepest


def _callees_first(functions: Mapping[FunctionKey, FunctionProto]) -> list[FunctionKey] | None:
    """Every function after those that it calls; None where functions are recursive."""
    done: dict[FunctionKey, bool] = {}
    order: list[FunctionKey] = []
    for start in functions:
        stack = [(start, _calls(functions[start], functions))] if start not in done else []
        done.setdefault(start, False)
        while stack:
            key, calls = stack[-1]
            called = next(calls, None)
            if called is None:
                done[key] = True
                order.append(key)
                stack.pop()
            elif called not in done:
                done[called] = False
                stack.append((called, _calls(functions[called], functions)))
            elif not done[called]:
                return None
    return order


def _calls(function: FunctionProto, functions: Mapping[FunctionKey, FunctionProto]) -> Iterator[FunctionKey]:
    stack: list[NodeProto] = list(function.node)
    while stack:
        node = stack.pop()
        if (key := function_key(node)) in functions:
            yield key
        stack += [inner for graph in subgraphs(node) for inner in graph.node]


def _invalid(found: str, asked: str) -> Refusal:
    return Refusal(Code.MODEL_INVALID, found, asked, "export the model with its functions inlined")
