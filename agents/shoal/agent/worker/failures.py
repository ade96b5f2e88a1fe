"""Maps ONNX Runtime's errors of a failed run to refusals: who is at fault, in a text without the runtime's source
files."""

import re
from typing import Final

from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument  # pyright: ignore[reportMissingImports]

from shoal.types.codes import Code, Refusal

_OUT_OF_MEMORY: Final = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")
_NODE: Final = re.compile(
    r"Non-zero status code returned while running (?P<operator>\S+) node\. Name:'(?P<name>[^']*)' Status Message:"
)
_STATUS: Final = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ :")
_CHECK: Final = re.compile(r"^.* was false\.", re.DOTALL)
"""The C++ condition of a check, after its file and function; the explanation follows it."""
_SOURCE: Final = re.compile(r"\S*\.(?:h|hpp|cc|cpp|cu|cuh):\d+\s*")
_PLACE: Final = re.compile(r"\b(?:hostname|file|line|expr)=[^;]*;?\s*")
"""Where the code of a GPU provider failed."""
_SIGNATURE: Final = re.compile(
    r"^.*onnxruntime::[^()]*\(.*\)(?: const)?\s*|^(?:static |virtual |void ).*\)\s*", re.DOTALL
)
_VALUES: Final = re.compile(
    r"shape|dimension|\bdims?\b|\bax[ei]s\b|\brank\b|channels|broadcast|mismatch|incompatible|bounds|\brange\b|overflow"
    r"|must (?:be|have|match)|should (?:be|not)|(?:greater|less|larger|smaller) than|exceeds|negative"
    r"|invalid (?:value|index|input|argument)|\bsto(?:i|l|ll|f|d|ul|ull)\b",
    re.IGNORECASE,
)
"""How an operator refuses the values or shapes of its inputs. ONNX Runtime 1.31 uses FAIL and RUNTIME_EXCEPTION for
most of these checks (`ORT_ENFORCE`, `ORT_RETURN_IF_NOT`), and INVALID_ARGUMENT for the others."""


def memory_refusal(error: Exception) -> Refusal | None:
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
        return Refusal(
            Code.OUT_OF_MEMORY, brief_error(error), "", "raise the workload's memory or send smaller tensors"
        )
    return None


def run_refusal(error: Exception, *, empty: bool = False) -> Refusal:
    """The refusal for a failed run.

    `empty`: an input had no elements. If an operator then fails, it does not support empty inputs, which is the
    client's error.
    """
    short = memory_refusal(error)
    if short is not None:
        return short
    if isinstance(error, UnicodeDecodeError):
        return Refusal(
            Code.RUNTIME_FAILED,
            "an output string is not UTF-8",
            "UTF-8",
            "ONNX Runtime's binding hands out nothing else",
        )
    found = brief_error(error)
    if isinstance(error, InvalidArgument) or (_is_operator_error(error) and (empty or _VALUES.search(found))):
        asked = "inputs that the graph takes"
        return Refusal(Code.INVALID_ARGUMENT, found, asked, "see the model's metadata for its shapes")
    return Refusal(Code.RUNTIME_FAILED, found, "an answer", "check the inputs' values and shapes")


def brief_error(error: Exception) -> str:
    """One line, without the runtime's files, functions and conditions."""
    text = " ".join(str(error).split())
    where = ""
    node = _NODE.search(text)
    if node is not None:
        where = f"{node['operator']} node {node['name']!r}: " if node["name"] else f"{node['operator']} node: "
        text = text[node.end() :]
    text = _PLACE.sub("", _CHECK.sub("", _STATUS.split(text)[-1]))
    if _SOURCE.search(text):
        text = _SIGNATURE.sub("", _SOURCE.sub("", text).strip())
    return f"{type(error).__name__}: {where}{text.strip() or 'no reason given'}"[:500]


def _is_operator_error(error: Exception) -> bool:
    """Whether an operator's kernel refused, rather than the session or its provider."""
    return _NODE.search(" ".join(str(error).split())) is not None
