"""What ONNX Runtime's partitioner does with the models of ONNX's own backend tests, beside what a worker makes of it:
`python -m harness.measure.partitions DEVICE STEP` prints a line of JSON for each model that was tried.

In a process of its own, because a provider may crash on a model.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import onnx
import onnxruntime as ort

from harness.models import onnx_backend
from shoal.agent.clock import SystemClock
from shoal.agent.devices.plugins.driver import SIMULATORS, PluginDriver
from shoal.agent.driver_port import DriverOptions
from shoal.agent.worker.engine import open_engine, session_options
from shoal.agent.worker.providers import Provider, add_provider
from shoal.types.codes import ShoalError


@dataclass(frozen=True, slots=True)
class Tried:
    """One model on one provider."""

    # Family and name of the backend test.
    name: str
    # Operators of the model's graph.
    graph: tuple[str, ...]
    # The runtime's own strict option lets it open.
    strict: bool
    # A worker would serve it.
    served: bool
    # Operators that the receipt learns. Empty where it is not served.
    taken: tuple[str, ...]
    # Code of the refusal. Empty where it is served.
    code: str
    # Text of the refusal. Empty where it is served.
    found: str


def devices() -> PluginDriver:
    """All devices of this machine's plugins, with the simulators."""
    return PluginDriver(SystemClock(), DriverOptions(simulate=SIMULATORS))


def try_models(device: str, step: int) -> Iterator[Tried]:
    """Every `step`-th case of the operators' family."""
    driver = devices()
    found = next(each for each in driver.discover() if each.name == device)
    provider = Provider(found.provider, driver.access(device))
    cases = [case for case in onnx_backend.cases() if case.name.startswith("node/")]
    for case in cases[::step]:
        graph = tuple(sorted({node.op_type for node in onnx.load_from_string(case.content).graph.node}))
        strict = _opens_strictly(case.content, provider)
        try:
            engine = open_engine(case.content, provider)
            yield Tried(case.name, graph, strict, True, tuple(sorted(engine.operators)), "", "")
        except ShoalError as error:
            yield Tried(case.name, graph, strict, False, (), error.code, error.refusal.found)


def _opens_strictly(content: bytes, provider: Provider) -> bool:
    options = session_options(1)
    more = add_provider(options, provider)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        ort.InferenceSession(content, options, providers=more, enable_fallback=0)
    except Exception:  # whatever it says, it does not open
        return False
    return True


if __name__ == "__main__":
    for each in try_models(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(asdict(each)), flush=True)
