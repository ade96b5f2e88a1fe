"""What clients did and saw, and the judge of it: apart from the code under test, of which it imports nothing.

A client records each call with start, end and outcome. `ok` was answered, `refused` was told no, `unknown` got neither:
it may have happened or not, so it counts neither as answered nor as refused. The judge compares with a model of the
service: a function from what was asked to the one right answer.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Done:
    """One call that is over. start, end: seconds on the client's clock. detail: the answer, or why there is none."""

    call: int
    asked: Hashable
    start: float
    end: float
    outcome: Outcome
    detail: Hashable


@dataclass
class History:
    """One client's record, or several clients' together."""

    begun: dict[int, tuple[Hashable, float]] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)

    def begin(self, asked: Hashable, now: float) -> int:
        call = len(self.begun)
        self.begun[call] = (asked, now)
        return call

    def end(self, call: int, outcome: Outcome, detail: Hashable, now: float) -> None:
        asked, start = self.begun[call]
        self.done.append(Done(call, asked, start, now, outcome, detail))


@dataclass(frozen=True, slots=True)
class Verdict:
    """violations: what must never be. codes: of refused and unknown calls, as the client saw them."""

    sent: int
    answered: int
    refused: int
    unknown: int
    codes: tuple[tuple[Hashable, int], ...]
    violations: tuple[str, ...]
    slowest_s: float

    @property
    def lost(self) -> int:
        """Calls without an answer, whatever they were told."""
        return self.sent - self.answered

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.answered} answered, {self.refused} refused, {self.unknown} unknown "
            f"{dict(self.codes)}, slowest {self.slowest_s * 1000:.0f} ms, violations: {list(self.violations[:5])}"
        )


def judge(histories: Iterable[History], answer_of: Callable[[Hashable], Hashable]) -> Verdict:
    """answer_of: the model of the service. Each call must end exactly once; each answer must be its question's."""
    sent = 0
    outcomes: Counter[Outcome] = Counter()
    codes: Counter[Hashable] = Counter()
    violations: list[str] = []
    slowest = 0.0
    for number, history in enumerate(histories):
        sent += len(history.begun)
        ended = Counter(done.call for done in history.done)
        for call, (asked, _) in history.begun.items():
            if ended[call] != 1:
                violations.append(f"client {number}: call {call} ({asked!r:.60}) ended {ended[call]} times")
        for done in history.done:
            outcomes[done.outcome] += 1
            slowest = max(slowest, done.end - done.start)
            if done.end < done.start:
                violations.append(f"client {number}: call {done.call} ended before it began")
            if done.outcome is not Outcome.OK:
                codes[done.detail] += 1
            elif done.detail != answer_of(done.asked):
                violations.append(f"client {number}: {done.asked!r:.60} was answered {done.detail!r:.60}")
    return Verdict(
        sent=sent,
        answered=outcomes[Outcome.OK],
        refused=outcomes[Outcome.REFUSED],
        unknown=outcomes[Outcome.UNKNOWN],
        codes=tuple(codes.most_common()),
        violations=tuple(violations),
        slowest_s=slowest,
    )
