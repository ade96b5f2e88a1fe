"""One run of MLCommons LoadGen against one system under test: `python benchmarks/_loadgen_child.py SPEC`.

It is a separate process, because an unmodified tritonclient cannot be loaded beside our stubs (both name the same
messages). SPEC: JSON with system (`in-process` or `shoal`), scenario, settings, model, inputs (an .npz of samples),
at_once, log (a folder), and for `shoal` url, ca, certificate, key and name. It prints, as JSON, how many samples were
answered, failed and wrong. LoadGen's own summary is then in the folder.

A sample is wrong if its answer differs in any bit from ONNX Runtime's in this process. A failed sample is reported to
LoadGen as answered, because LoadGen cannot be told of failures, and counted here.
"""

import array
import json
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlperf_loadgen  # pyright: ignore[reportMissingImports]
import numpy as np
import onnxruntime

DTYPES = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
Answer = Callable[[int], list[Any]]
"""The system's answer to one sample, by its index; raises on failure."""


@dataclass
class Counts:
    """Outcomes of one run."""

    # Samples answered, failed and wrong ones included.
    samples: int = 0
    # Samples whose request failed.
    failed: int = 0
    # Samples whose answer differs from ONNX Runtime's.
    wrong: int = 0
    # How often each failure occurred.
    reasons: dict[str, int] = field(default_factory=dict)


def session_of(model: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_process(model: str, inputs: list[dict[str, Any]]) -> Callable[[], Answer]:
    session = session_of(model)
    return lambda: lambda index: list(session.run(None, inputs[index]))


def over_the_gateway(spec: dict[str, Any], inputs: list[dict[str, Any]], outputs: list[str]) -> Callable[[], Answer]:
    """An unmodified tritonclient, which all callers share."""
    from tritonclient import grpc as triton

    def tensor(name: str, value: Any) -> Any:
        found = triton.InferInput(name, list(value.shape), DTYPES[value.dtype.name])
        found.set_data_from_numpy(value)
        return found

    made = [[tensor(name, value) for name, value in each.items()] for each in inputs]
    asked = [triton.InferRequestedOutput(name) for name in outputs]
    client = triton.InferenceServerClient(
        spec["url"], ssl=True, root_certificates=spec["ca"], private_key=spec["key"],
        certificate_chain=spec["certificate"],
    )  # fmt: skip

    def answer(index: int) -> list[Any]:
        result = client.infer(spec["name"], made[index], outputs=asked)
        assert result is not None
        return [result.as_numpy(name) for name in outputs]

    return lambda: answer


class System:
    """Answers LoadGen's queries with `at_once` concurrent callers. Failures and differences are counted, never
    hidden."""

    def __init__(self, make: Callable[[], Answer], expected: list[list[bytes]], at_once: int) -> None:
        self.counts = Counts()
        self._expected = expected
        self._due: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(make(),), daemon=True) for _ in range(at_once)]
        for each in self._threads:
            each.start()

    def issue(self, samples: list[Any]) -> None:
        for sample in samples:
            self._due.put((sample.id, sample.index))

    def flush(self) -> None:
        """Does nothing, because nothing is held back."""

    def stop(self) -> None:
        for _ in self._threads:
            self._due.put(None)
        for each in self._threads:
            each.join()

    def _work(self, answer: Answer) -> None:
        while (due := self._due.get()) is not None:
            identity, index = due
            reason, data = "", b""
            try:
                found = [value.tobytes() for value in answer(index)]
                data = found[0]
                wrong = found != self._expected[index]
            except Exception as error:
                reason, wrong = f"{type(error).__name__}: {error}"[:160], False
            self._count(reason, wrong)
            held = array.array("B", data or b"\0")
            address, length = held.buffer_info()
            mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(identity, address, length)])

    def _count(self, reason: str, wrong: bool) -> None:
        with self._lock:
            self.counts.samples += 1
            self.counts.wrong += wrong
            if reason:
                self.counts.failed += 1
                self.counts.reasons[reason] = self.counts.reasons.get(reason, 0) + 1


def settings_of(spec: dict[str, Any]) -> Any:
    found = mlperf_loadgen.TestSettings()
    found.scenario = getattr(mlperf_loadgen.TestScenario, spec["scenario"])
    found.mode = mlperf_loadgen.TestMode.PerformanceOnly
    for name, value in spec["settings"].items():
        assert hasattr(found, name), name
        setattr(found, name, value)
    return found


def main() -> None:
    spec = json.loads(sys.argv[1])
    with np.load(spec["inputs"]) as packed:
        count = len(next(iter(packed.values())))
        inputs = [{name: packed[name][index : index + 1] for name in packed} for index in range(count)]
    session = session_of(spec["model"])
    outputs = [output.name for output in session.get_outputs()]
    expected = [[value.tobytes() for value in session.run(None, each)] for each in inputs]
    shoal = spec["system"] == "shoal"
    make = over_the_gateway(spec, inputs, outputs) if shoal else in_process(spec["model"], inputs)
    make()(0)  # opens connections, fills caches
    system = System(make, expected, spec["at_once"])
    logs = mlperf_loadgen.LogSettings()
    logs.log_output.outdir = spec["log"]
    logs.log_output.copy_summary_to_stdout = False
    logs.enable_trace = False
    Path(spec["log"]).mkdir(parents=True, exist_ok=True)
    sut = mlperf_loadgen.ConstructSUT(system.issue, system.flush)
    library = mlperf_loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    mlperf_loadgen.StartTestWithLogSettings(sut, library, settings_of(spec), logs)
    mlperf_loadgen.DestroyQSL(library)
    mlperf_loadgen.DestroySUT(sut)
    system.stop()
    print(json.dumps(vars(system.counts)), flush=True)


if __name__ == "__main__":
    main()
