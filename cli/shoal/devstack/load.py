"""Load through a gateway, with a record of every request and its outcome."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.client import Context, InferenceClient
from shoal.client.tensors import Tensors
from shoal.types.codes import Code, ShoalError, is_lost

OK: Final = "ok"
DEADLINE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class LoadCall:
    """One request."""

    # Seconds from the load's start until it was sent.
    at: float
    # Seconds until it ended.
    took_s: float
    # `ok`, or the code of the refusal.
    outcome: str


@dataclass
class ClosedLoopLoad:
    """Closed-loop clients: each sends its next request when the last one ends."""

    # Tenant's context of the region whose gateway is called.
    context: Context
    # Name of the workload.
    workload: str
    # The same for every request.
    inputs: Tensors
    # Outputs of every answer.
    expected: dict[str, NDArray[Any]]
    # Number of connections, a thread each.
    clients: int = 4
    # Largest difference between a value and the expected one; 0: equal bit for bit.
    at_most: float = 0.0
    # Every request that has ended.
    calls: list[LoadCall] = field(default_factory=list)
    # Answers that differ from `expected` by more than that.
    wrong_count: int = 0
    # Set by `stop`: no client sends another request.
    _stop: threading.Event = field(default_factory=threading.Event)
    # One per client.
    _threads: list[threading.Thread] = field(default_factory=list)
    # Monotonic time in seconds of `start`.
    _began: float = 0.0

    def start(self) -> None:
        self._began = time.monotonic()  # noqa: TID251 - measures
        for index in range(self.clients):
            thread = threading.Thread(target=self._run, name=f"load-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began  # noqa: TID251 - measures

    def stop(self) -> None:
        """Returns when the last request has ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def outcomes(self) -> Counter[str]:
        return Counter(call.outcome for call in self.calls)

    @property
    def lost_count(self) -> int:
        """Requests without an answer, as a gateway counts them: refusals and own deadlines do not count."""
        return sum(call.outcome != OK and is_lost(Code(call.outcome), own_limit=True) for call in self.calls)

    def summary(self) -> str:
        return summary_of(self.calls, self.lost_count)

    def count_answered_since(self, at: float) -> int:
        """Requests sent after `at` that were answered."""
        return sum(call.outcome == OK and call.at > at for call in self.calls)

    def _is_right(self, found: NDArray[Any], expected: NDArray[Any]) -> bool:
        if not self.at_most:
            return np.array_equal(found, expected)
        return found.shape == expected.shape and np.allclose(found, expected, rtol=0, atol=self.at_most)

    def _run(self) -> None:
        with InferenceClient(self.context, retries=0) as client:  # each refusal counts
            while not self._stop.is_set():
                at = self.elapsed_s()
                outcome: str = OK
                try:
                    answer = client.infer(self.workload, self.inputs, deadline_s=DEADLINE_S)
                    if not all(self._is_right(answer.outputs[name], value) for name, value in self.expected.items()):
                        self.wrong_count += 1
                except ShoalError as error:
                    outcome = str(error.code)
                self.calls.append(LoadCall(at, self.elapsed_s() - at, outcome))


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Several loads at once, counted as one."""

    loads: Sequence[ClosedLoopLoad]

    def start(self) -> None:
        for each in self.loads:
            each.start()

    def stop(self) -> None:
        """Returns when the last request has ended."""
        for each in self.loads:
            each.stop()

    def elapsed_s(self) -> float:
        return self.loads[0].elapsed_s()

    @property
    def calls(self) -> list[LoadCall]:
        return [call for each in self.loads for call in each.calls]

    @property
    def lost_count(self) -> int:
        return sum(each.lost_count for each in self.loads)

    @property
    def wrong_count(self) -> int:
        return sum(each.wrong_count for each in self.loads)

    def outcomes(self) -> Counter[str]:
        return sum((each.outcomes() for each in self.loads), Counter[str]())

    def summary(self) -> str:
        """As of one load."""
        return summary_of(self.calls, self.lost_count)

    def count_answered_since(self, at: float) -> int:
        return sum(each.count_answered_since(at) for each in self.loads)

    def rate(self, over_s: float) -> float:
        """Requests that ended in a second, over the last `over_s` seconds."""
        now = self.elapsed_s()
        return sum(call.at + call.took_s > now - over_s for call in self.calls) / over_s

    def mean_rate(self) -> float:
        """Requests that ended in a second, from the first to the last."""
        ends = [call.at + call.took_s for call in self.calls]
        return len(ends) / max(ends) if ends else 0.0


def summary_of(calls: Sequence[LoadCall], lost: int) -> str:
    """Outcome of all requests, for people."""
    answered = sum(call.outcome == OK for call in calls)
    return f"{len(calls)} sent, {answered} answered, {len(calls) - answered - lost} refused or given up, {lost} lost"
