"""What the runtime can load: its newest IR version and opsets, found with small models, and its list of kernels."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # pyright: ignore

from shoal.agent.packing import pack, unpack
from shoal.agent.worker.child import answer_of_child
from shoal.agent.worker.engine import session_options
from shoal.agent.worker.probe import read_graph
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.types.receipt import Kernel, RuntimeSupport
from shoal.types.workload import PREPARABLE
from shoal.wire.varint import varint

_DOMAINS: Final = {"": "ai.onnx", "ai.onnx.ml": "ai.onnx.ml", "com.microsoft": "com.microsoft"}
"""Operator domains: the name in a model, and the name in a profile."""
_KERNEL_DOMAINS: Final = frozenset({"", "ai.onnx.ml"})
_MAX_VERSION: Final = 200
"""Upper limit of the search. ONNX adds one or two versions a year (onnx, docs/Versioning.md), and the search would
never end with a runtime that accepts any version."""
_NO_LAST_VERSION: Final = 2**31 - 1
"""Last version of a kernel that has no upper limit."""
_BUILT_IN: Final = frozenset({CPU_PROVIDER, "AzureExecutionProvider"})
"""Providers that open on every machine."""
_LIST_S: Final = 5.0
"""The list takes 10 ms, and CUDA's libraries some 100 ms to load."""


@dataclass(frozen=True, slots=True)
class KernelList:
    """What the child answers."""

    kernels: tuple[Kernel, ...]


def runtime_support() -> RuntimeSupport:
    """Takes some 20 ms. Leaves out what the runtime does not report."""
    plain = read_graph("launch")
    ir_version = _newest_loadable(lambda version: plain + b"\x08" + varint(version))
    opsets = {name: _newest_loadable(_model_with_import(plain, domain)) for domain, name in _DOMAINS.items()}
    newest_by_domain = {name: newest for name, newest in opsets.items() if newest}
    return RuntimeSupport(ir_version, newest_by_domain, _kernels(), PREPARABLE if find_spec("onnx") else ())


def _newest_loadable(model_of: Callable[[int], bytes]) -> int:
    """The last of the consecutive versions that load. 0: none does."""
    newest = 0
    for version in range(1, _MAX_VERSION):
        if _can_load(model_of(version)):
            newest = version
        elif newest:
            break
    return newest


def _can_load(model: bytes) -> bool:
    try:
        ort.InferenceSession(model, session_options(1), providers=["CPUExecutionProvider"])
    except Exception:  # any exception means that this version does not load
        return False
    return True


def _model_with_import(model: bytes, domain: str) -> Callable[[int], bytes]:
    """The model with one more import of the domain, which takes precedence: concatenated messages merge, and ONNX
    Runtime reads the imports in order (core/graph/model.cc)."""

    def with_version(version: int) -> bytes:
        named = b"\x0a" + varint(len(domain)) + domain.encode() if domain else b""
        entry = named + b"\x10" + varint(version)
        return model + b"\x42" + varint(len(entry)) + entry

    return with_version


def _kernels() -> tuple[Kernel, ...]:
    """Kernels of all providers of this build, because one provider computes what another lacks. Empty if the build
    lists none.

    The call opens every provider that the build knows, and ends the process where one's libraries are missing:
    `onnxruntime-gpu` knows TensorRT, which few machines have (onnxruntime_pybind_schema.cc). So a build with others
    than the processor's is asked in a child, whose end is survived.

    A confined worker may name its threads and its child may not (`isolation`), so CUDA's list may be empty there, if
    the provider opens its device for it. Then it is learnt at loads what does not load. To ask before the worker is
    confined would take an import of the runtime, which starts threads, of every worker.
    """
    listed = getattr(runtime, "get_all_opkernel_def", None)
    if listed is None:
        return ()
    if set(ort.get_available_providers()) <= _BUILT_IN:
        return _kernels_of(listed())
    answer = answer_of_child(lambda: pack(KernelList(_kernels_of(listed()))), _LIST_S)
    return unpack(KernelList, answer).kernels if answer else ()


def _kernels_of(listed: Iterable[Any]) -> tuple[Kernel, ...]:
    found: dict[str, set[tuple[int, int]]] = {}
    for kernel in listed:
        if kernel.domain in _KERNEL_DOMAINS:
            first, last = kernel.version_range
            name = f"{kernel.domain}:{kernel.op_name}" if kernel.domain else kernel.op_name
            found.setdefault(name, set()).add((first, 0 if last >= _NO_LAST_VERSION else last))
    return tuple(Kernel(name, tuple(bound for pair in sorted(found[name]) for bound in pair)) for name in sorted(found))
