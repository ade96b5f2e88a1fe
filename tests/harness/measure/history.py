"""What clients did and saw, and its checker, which imports nothing of the code under test.

A client records each call with start, end and outcome. `ok` was answered and `refused` was rejected. `unknown` got
neither: it may have happened or not, so it counts neither as answered nor as refused. The checker compares with a model
of the service: a function from the request to its one right answer.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class CallOutcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """One call that has ended."""

    # Number of the call in its history.
    call: int
    # What was asked.
    request: Hashable
    # Seconds on the client's clock.
    start: float
    # Seconds on the client's clock.
    end: float
    # See `CallOutcome`.
    outcome: CallOutcome
    # The answer, or why there is none.
    detail: Hashable


@dataclass
class CallHistory:
    """One client's record, or several clients' together."""

    calls: dict[int, tuple[Hashable, float]] = field(default_factory=dict)
    completed: list[CompletedCall] = field(default_factory=list)

    def begin(self, request: Hashable, now: float) -> int:
        call = len(self.calls)
        self.calls[call] = (request, now)
        return call

    def end(self, call: int, outcome: CallOutcome, detail: Hashable, now: float) -> None:
        asked, start = self.calls[call]
        self.completed.append(CompletedCall(call, asked, start, now, outcome, detail))


@dataclass(frozen=True, slots=True)
class HistoryVerdict:
    """What the checker found."""

    # Calls that began.
    sent: int
    # Calls with outcome OK.
    answered: int
    # Calls with outcome REFUSED.
    refused: int
    # Calls with outcome UNKNOWN.
    unknown: int
    # (detail, count) of refused and unknown calls, the most frequent first.
    codes: tuple[tuple[Hashable, int], ...]
    # What must never be; empty: the history is right.
    violations: tuple[str, ...]
    # Longest call of any outcome.
    slowest_s: float

    @property
    def lost_count(self) -> int:
        """Calls without an answer, whatever the refusal."""
        return self.sent - self.answered

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.answered} answered, {self.refused} refused, {self.unknown} unknown "
            f"{dict(self.codes)}, slowest {self.slowest_s * 1000:.0f} ms, violations: {list(self.violations[:5])}"
        )


def check_histories(histories: Iterable[CallHistory], answer_of: Callable[[Hashable], Hashable]) -> HistoryVerdict:
    """answer_of: the model of the service. Each call must end exactly once, and each answer must be right."""
    sent = 0
    outcomes: Counter[CallOutcome] = Counter()
    codes: Counter[Hashable] = Counter()
    violations: list[str] = []
    slowest = 0.0
    for number, history in enumerate(histories):
        sent += len(history.calls)
        ended = Counter(done.call for done in history.completed)
        for call, (asked, _) in history.calls.items():
            if ended[call] != 1:
                violations.append(f"client {number}: call {call} ({asked!r:.60}) ended {ended[call]} times")
        for done in history.completed:
            outcomes[done.outcome] += 1
            slowest = max(slowest, done.end - done.start)
            if done.end < done.start:
                violations.append(f"client {number}: call {done.call} ended before it began")
            if done.outcome is not CallOutcome.OK:
                codes[done.detail] += 1
            elif done.detail != answer_of(done.request):
                violations.append(f"client {number}: {done.request!r:.60} was answered {done.detail!r:.60}")
    return HistoryVerdict(
        sent=sent,
        answered=outcomes[CallOutcome.OK],
        refused=outcomes[CallOutcome.REFUSED],
        unknown=outcomes[CallOutcome.UNKNOWN],
        codes=tuple(codes.most_common()),
        violations=tuple(violations),
        slowest_s=slowest,
    )
