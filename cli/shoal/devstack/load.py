"""Load through a gateway, with a record of every request: what was sent and what became of it."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.client import Context, Inference
from shoal.client.inference import Tensors
from shoal.types.codes import ShoalError


@dataclass(frozen=True, slots=True)
class Call:
    """One request. outcome: `ok`, or the code of the refusal. at, took_s: seconds from the load's start."""

    at: float
    took_s: float
    outcome: str


@dataclass
class Load:
    """Closed loop: `clients` connections, each sends its next request when the last is answered.

    expected: the outputs that every answer must equal, bit for bit.
    """

    context: Context
    workload: str
    inputs: Tensors
    expected: dict[str, NDArray[Any]]
    clients: int = 4
    calls: list[Call] = field(default_factory=list)
    wrong: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _began: float = 0.0

    def start(self) -> None:
        self._began = time.monotonic()  # noqa: TID251 - measures
        for index in range(self.clients):
            thread = threading.Thread(target=self._run, name=f"load-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def elapsed(self) -> float:
        return time.monotonic() - self._began  # noqa: TID251 - measures

    def stop(self) -> None:
        """Returns when the last request was answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def outcomes(self) -> Counter[str]:
        return Counter(call.outcome for call in self.calls)

    def answered_after(self, at: float) -> int:
        """Requests sent after `at` that were answered."""
        return sum(call.outcome == "ok" and call.at > at for call in self.calls)

    def _run(self) -> None:
        with Inference(self.context) as client:
            while not self._stop.is_set():
                at = self.elapsed()
                outcome = "ok"
                try:
                    answer = client.infer(self.workload, self.inputs, deadline_s=20.0)
                    same = all(np.array_equal(answer.outputs[name], value) for name, value in self.expected.items())
                    if not same:
                        self.wrong += 1
                except ShoalError as error:
                    outcome = str(error.code)
                self.calls.append(Call(at, self.elapsed() - at, outcome))
