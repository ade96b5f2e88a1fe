"""ONNX Runtime in process, without any server: the rate that no server on the same cores can pass.

`floor.py SPEC` reads lines of JSON (model, threads, seconds) and answers each with one: count, per_s, p50_s,
p99_s, cpu_s. Models have the shapes of their inputs, as Shoal's worker fixes them.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_S = 30.0


def main() -> None:
    import numpy as np
    import onnxruntime

    from shoal.agent.worker.shapes import fix_shapes

    rng = np.random.default_rng(7)
    calls = dict[str, tuple[Any, Any]]()
    for name, spec in json.loads(Path(sys.argv[1]).read_text()).items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        shapes = {each: tuple(shape) for each, _, shape in spec["inputs"]}
        model = fix_shapes(Path(spec["path"]).read_bytes(), shapes)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {each: (rng.random(shape) * 200).astype(dtype) for each, dtype, shape in spec["inputs"]}
        calls[name] = (session, feeds)
    for line in sys.stdin:
        model, threads, seconds = json.loads(line)
        session, feeds = calls[model]
        print(json.dumps(measure(session, feeds, threads, min(seconds, MOST_S))), flush=True)


def measure(session: Any, feeds: Any, threads: int, seconds: float) -> dict[str, float]:
    """At least three runs a thread."""
    took = list[list[float]]()

    def run() -> None:
        own = list[float]()
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end or len(own) < 3:
            session.run(None, feeds)
            own.append(time.perf_counter() - began)
        took.append(own)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    began, cpu = time.perf_counter(), time.process_time()
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    passed, cpu = time.perf_counter() - began, time.process_time() - cpu
    ordered = sorted(each for own in took for each in own)
    count = len(ordered)
    return {
        "count": count,
        "per_s": count / passed,
        "cpu_s": cpu,
        "p50_s": ordered[count // 2],
        "p99_s": ordered[min(count - 1, int(count * 0.99))],
    }


class Floor:
    """The same, asked from another process."""

    def __init__(self, process: "subprocess.Popen[str]", threads: int) -> None:
        self.pid = process.pid
        self._process = process
        self._threads = threads

    def ask(self, model: str, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([model, self._threads, seconds]) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def running_floor(spec: Path, threads: int, prefix: list[str]) -> Iterator[Floor]:
    """prefix: what the command line begins with."""
    command = [*prefix, sys.executable, __file__, str(spec)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Floor(process, threads)
        finally:
            process.kill()


if __name__ == "__main__":
    main()
