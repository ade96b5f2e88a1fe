"""The page of the REST methods, from the paths that the data port matches."""

import ast
import inspect
from collections.abc import Iterator

from generators.markdown import GENERATED, code, page, table
from shoal.agent.dataplane import rest
from shoal.agent.dataplane.transport import ORIGIN_KEY, REQUEST_KEY, TRACE_KEY

MEANINGS = {
    "GET /v2/health/live": "Whether the process runs. Needs no identity.",
    "GET /v2/health/ready": "Whether the front has what it needs to serve.",
    "GET /v2": "Name, version and extensions of the server.",
    "GET /v2/models/stats": "Counts and times of every workload of the caller's tenant.",
    "GET /v2/models/{name}": "Inputs and outputs of a workload: names, types, shapes.",
    "GET /v2/models/{name}/ready": "Whether a replica is ready, also of one that does not exist; why not.",
    "GET /v2/models/{name}/config": "The configuration in Triton's form.",
    "GET /v2/models/{name}/stats": "Counts and times of one workload.",
    "POST /v2/models/{name}/infer": "One inference; tensors as JSON, or binary behind JSON (see the headers).",
    "POST /v2/models/{name}/generate": "One inference from and to plain JSON fields: Triton's generate extension.",
    "POST /v2/models/{name}/generate_stream": "The same, answered as server-sent events.",
    "POST /v2/repository/index": "The caller's workloads, and whether each is ready.",
    "POST /v2/repository/models/{name}/load": "Refused (`UNIMPLEMENTED`): models are loaded by `shoal apply`.",
    "POST /v2/repository/models/{name}/unload": "Refused (`UNIMPLEMENTED`): models are removed by `shoal delete`.",
    "GET /v2/systemsharedmemory/status": "Shared-memory regions that the caller registered.",
    "GET /v2/systemsharedmemory/region/{name}/status": "One of them.",
    "POST /v2/systemsharedmemory/region/{name}/register": "Registers a region; the agent must allow it.",
    "POST /v2/systemsharedmemory/unregister": "Forgets all regions of the caller.",
    "POST /v2/systemsharedmemory/region/{name}/unregister": "Forgets one region.",
    "GET /v2/cudasharedmemory/status": "Always empty: there is no CUDA shared memory.",
    "GET /v2/cudasharedmemory/region/{name}/status": "Refused (`UNIMPLEMENTED`).",
    "POST /v2/cudasharedmemory/region/{name}/register": "Refused (`UNIMPLEMENTED`).",
    "POST /v2/cudasharedmemory/unregister": "Nothing to do.",
    "POST /v2/cudasharedmemory/region/{name}/unregister": "Nothing to do.",
}
"""Method and path -> what it does."""

_HEAD = f"""# REST

{GENERATED}

Every gateway and agent answers the REST form of the Open Inference Protocol at its data port, over
HTTP/1.1 and HTTP/2, beside [gRPC](grpc/inference.md). The port takes TLS alone. A caller shows a
client certificate, or `Authorization: Bearer TOKEN`. A path under `/v2/models/{{name}}` may also have
`/versions/{{version}}` after the name. A request that is refused has a body with `error` and `code`
([reason codes](codes.md)). How to call it, with examples: [inference](../guides/inference.md).
"""

_HEADERS = (
    ("`inference-header-content-length`", "Bytes of JSON at the body's start; binary tensors follow."),
    (
        "`shoal-deadline-ms`",
        "Milliseconds until the client gives up; afterwards the request is not run. Over gRPC its own deadline counts.",
    ),
    ("`authorization: Bearer TOKEN`", "Who calls, where no client certificate does."),
    ("`content-encoding`", "`gzip` or `deflate` of a request's body."),
    (
        f"`{REQUEST_KEY}`",
        "Id of the request: printable ASCII, at most 128 characters. It comes back, and stands in logs and traces.",
    ),
    (f"`{TRACE_KEY}`", "Trace context (W3C)."),
    (f"`{ORIGIN_KEY}`", "Origin of the request, as `spec.traffic.from` names it."),
)


def rest_methods() -> str:
    return page(_lines())


def paths() -> Iterator[str]:
    """`GET /v2/models/{name}` of every path that the module matches, in its order, without versions."""
    functions = [each for each in ast.walk(ast.parse(inspect.getsource(rest))) if isinstance(each, _FUNCTIONS)]
    found = (path for each in functions if each.name in _UNDER for path in _matched(each, _UNDER[each.name]))
    yield from dict.fromkeys(found)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNDER = {
    "_answer": (),
    "_answer_small": (),
    "_shared_memory": ("v2", "systemsharedmemory"),
    "_cuda_shared_memory": ("v2", "cudasharedmemory"),
}
"""Functions that match a method and a path, and what precedes the path there."""


def _matched(function: ast.AST, under: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.MatchSequence) and len(node.patterns) == 2:
            method, path = node.patterns
            for verb in _words(method):
                for steps in _alternatives(path):
                    if verb != "{name}" and "versions" not in steps:
                        yield f"{verb} /{'/'.join((*under, *steps))}"


def _alternatives(pattern: ast.pattern) -> Iterator[tuple[str, ...]]:
    """The paths that a pattern stands for; a name stands for one part of a path."""
    if isinstance(pattern, ast.MatchOr):
        for each in pattern.patterns:
            yield from _alternatives(each)
    elif isinstance(pattern, ast.MatchSequence):
        found: list[tuple[str, ...]] = [()]
        for step in pattern.patterns:
            found = [(*before, word) for before in found for word in _words(step)]
        yield from found


def _words(pattern: ast.pattern) -> Iterator[str]:
    match pattern:
        case ast.MatchValue(value=ast.Constant(value=str(word))):
            yield word
        case ast.MatchOr(patterns=patterns):
            for each in patterns:
                yield from _words(each)
        case ast.MatchAs():
            yield "{name}"
        case _:
            return


def _lines() -> Iterator[str]:
    yield _HEAD
    yield from table(("method", "what it does"), [(code(each), text) for each, text in MEANINGS.items()])
    yield "## Headers"
    yield ""
    yield from table(("header", "meaning"), _HEADERS)
