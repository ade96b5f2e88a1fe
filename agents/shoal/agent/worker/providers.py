"""Execution providers: how a session gets one, and which nodes of a graph it then took.

The runtime gives a node that a provider does not take to the CPU's provider, without a word. So sessions here record
who took what (ONNX Runtime, `session.record_ep_graph_assignment_info`), and the caller judges it.
"""

import io
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from string import Template
from typing import Final

import onnxruntime as ort

from shoal.agent.driver_port import DeviceAccess, ProviderPlugin
from shoal.types.codes import Code, refuse

FREE: Final = frozenset(
    {
        "Cast", "Concat", "Constant", "ConstantOfShape", "Equal", "Expand", "Flatten", "Gather", "Identity", "Not",
        "Range", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators that compute nothing: they move values, mostly those of shapes."""
CPU_PROVIDER: Final = "CPUExecutionProvider"
_CUDA_PROVIDER: Final = "CUDAExecutionProvider"
RUNTIME_VERSION: Final = f"onnxruntime {ort.__version__}"
_ONNX_DOMAINS: Final = ("", "ai.onnx", "com.ms.internal.nhwc")
"""The runtime moves operators into the last one for providers that want the channels last."""
_RECORD: Final = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True, slots=True)
class Partition:
    """Who computes the nodes of a graph, as the runtime divided it."""

    # Operator types, named as in a profile, with how many nodes of each the provider took.
    taken: Mapping[str, int]
    # The same of the nodes that others compute.
    left: Mapping[str, int]

    def share_left(self, node_flops: Mapping[str, float]) -> float:
        """The share of all FLOPs that others compute, given those of one node of each operator.

        The runtime may have replaced operators (a MatMul and an Add by a Gemm). One that `node_flops` does not know
        counts as the costliest where others compute it, and as nothing where the provider does, so that the share is
        at most too high. Where no FLOPs are known, it is 1.
        """
        most = max(node_flops.values(), default=0.0)
        left = sum(nodes * node_flops.get(name, 0.0 if name in FREE else most) for name, nodes in self.left.items())
        taken = sum(nodes * node_flops.get(name, 0.0) for name, nodes in self.taken.items())
        return left / (left + taken) if left + taken > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider of one device, for sessions of one precision."""

    # ONNX Runtime's name of it.
    name: str
    # What it needs to run on the device.
    access: DeviceAccess = field(default_factory=DeviceAccess)
    # Precision of the models; selects the provider's options.
    precision: str = "fp32"
    # Threads of one run.
    threads: int = 1

    @property
    def options(self) -> dict[str, str]:
        chosen = self.access.options.get(self.precision, self.access.options.get("", {}))
        return {key: Template(value).safe_substitute(threads=self.threads) for key, value in chosen.items()}


def add_provider(session: ort.SessionOptions, provider: Provider) -> list[str | tuple[str, dict[str, str]]]:
    """Let the sessions of these options run on the provider. Returns what else the session takes as `providers`.

    Raises ShoalError(LOAD_FAILED) if the runtime has no such provider, or the provider no such hardware.
    """
    if provider.name == CPU_PROVIDER:
        return [CPU_PROVIDER]
    session.add_session_config_entry(_RECORD, "1")
    if provider.access.plugin is not None:
        session.add_provider_for_devices([_plugin_device(provider.name, provider.access.plugin)], provider.options)
        return []
    if provider.name not in ort.get_available_providers():
        raise refuse(
            Code.LOAD_FAILED,
            f"{RUNTIME_VERSION} has {', '.join(ort.get_available_providers())}",
            provider.name,
            "install the ONNX Runtime build for this device",
        )
    if provider.name == _CUDA_PROVIDER:
        load_cuda_libraries()
    return [(provider.name, provider.options), CPU_PROVIDER]


@cache
def load_cuda_libraries() -> None:
    """CUDA's and cuDNN's libraries, where they came as wheels (`onnxruntime-gpu[cuda,cudnn]`): the linker does not look
    there, and the provider, which is linked to them, would not open. Those that no wheel brought are the linker's.

    What it misses, the runtime says in words; here it is left to the session's own error.
    """
    with redirect_stdout(io.StringIO()):
        ort.preload_dlls()


def partition(session: ort.InferenceSession, provider: str) -> Partition:
    """How the runtime divided the graph of an open session."""
    taken: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        (taken if part.ep_name == provider else left).update(_operator(node) for node in part.get_nodes())
    return Partition(dict(sorted(taken.items())), dict(sorted(left.items())))


def _operator(node: ort.OrtEpAssignedNode) -> str:
    return node.op_type if node.domain in _ONNX_DOMAINS else f"{node.domain}:{node.op_type}"


def _plugin_device(name: str, plugin: ProviderPlugin) -> ort.OrtEpDevice:
    """Raises ShoalError(LOAD_FAILED)."""
    try:
        if not any(each.ep_name == name for each in ort.get_ep_devices()):
            ort.register_execution_provider_library(name, plugin.library)
        listed = ort.get_ep_devices()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"[:300]
        raise refuse(Code.LOAD_FAILED, found, f"the plugin {name}", "see docs/guides/devices.md") from error
    fitting = [each for each in listed if each.ep_name == name and each.device.type.name == plugin.hardware]
    if plugin.index >= len(fitting):
        raise refuse(
            Code.LOAD_FAILED,
            f"{name} finds {len(fitting)} of kind {plugin.hardware}",
            f"number {plugin.index + 1}",
            "see whether the device is still there: shoal-agent doctor",
        )
    return fitting[plugin.index]
