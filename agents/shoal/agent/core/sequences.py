"""Sessions of stateful workloads, as the front that has them keeps them: what a step may do, how one goes elsewhere.

A session is a sequence of requests (`sequence_id`) whose state stays at one front. Every step has a number; the state
that counts is that after the last one. It goes to another front between two steps: offered first, which its receiver
keeps and does not run, then let go of for good, and only then committed. So it never runs at two, and what comes late
or twice is told by its run and step.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shoal.types.codes import Code, Refusal
from shoal.types.migration import Giver, Handover
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import SESSION_BYTES, WorkloadKey


class Key(NamedTuple):
    """Which session. sequence: as its client calls it."""

    workload: WorkloadKey
    sequence: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """content: little-endian, row-major, as the protocol's raw contents."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


State = Mapping[str, Tensor]
"""By the input that takes it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is asked. token: the same for the same call of a client, however often it comes here. asked: SHA-256 of the
    request. number: as the client counts, None where it does not."""

    token: str
    asked: bytes
    start: bool
    end: bool
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A session between two steps. run: of all sessions of its name, this one. step: how many it has had. token, asked,
    answer: of the last; no answer where it is too large to be kept. ended: by its client; kept for a while, for a last
    step that is asked again. hands: how often it went to another front; with the step, this tells a late message from a
    new one."""

    run: str
    step: int
    state: State
    token: str
    asked: bytes
    answer: bytes
    ended: bool = False
    hands: int = 0

    @property
    def size(self) -> Bytes:
        return Bytes(len(self.answer) + sum(len(tensor.content) for tensor in self.state.values()))


@dataclass(frozen=True, slots=True)
class Owned:
    """It is run here, by the worker of `assignment`."""

    assignment: str
    standing: Standing
    used_at: Elapsed


@dataclass(frozen=True, slots=True)
class Offered:
    """Another front has let go of it, or is about to: it is not run before that is certain. giver: the node that was
    named for it, and the move: it may let go also when that has turned since. used_at: its last step."""

    assignment: str
    giver: Giver
    standing: Standing
    until: Elapsed
    used_at: Elapsed


@dataclass(frozen=True, slots=True)
class Left:
    """It went `to` another replica, as its handover number `hands`, and is never run here again, unless it comes back
    by a later one."""

    run: str
    hands: int
    to: Handover
    since: Elapsed


Entry = Owned | Offered | Left


@dataclass(frozen=True, slots=True)
class Run:
    """state: None at a session's first step, where it is all zeros."""

    state: State | None
    number: int
    run: str
    hands: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    answer: bytes


@dataclass(frozen=True, slots=True)
class Go:
    to: Handover


@dataclass(frozen=True, slots=True)
class Wait:
    """Whether it is run here is not settled yet."""


def judge(entry: Entry | None, step: Step, listed: Container[str] | None = None) -> Run | Replay | Go | Wait | Refusal:
    """What becomes of a step that came here. entry: what is known of its session. listed: replicas that there are, None
    for any: where the one that it went to is gone, the next of its name begins wherever it is asked for."""
    match entry:
        case Owned(standing=standing):
            return _judge(standing, step)
        case Offered(standing=standing) if not step.start or _is_last(step, standing):
            return Wait()
        case Offered():
            return _begin(step)  # whoever begins it anew has no use for that one
        case Left(to=to) if step.start and listed is not None and to.assignment not in listed:
            return _begin(step)
        case Left(to=to):
            return Go(to)
        case None if step.start:
            return _begin(step)
        case None:
            return lost("no session of this name is here")


def _judge(standing: Standing, step: Step) -> Run | Replay | Refusal:
    if _is_last(step, standing) and not standing.answer:
        found = "the last step again, whose answer was too large to keep"
        return Refusal(Code.SESSION_STEP, found, f"step {standing.step + 1}", "go on with the next step, or begin anew")
    if _is_last(step, standing):
        return Replay(standing.answer)
    if step.start:
        return _begin(step)
    if standing.ended:
        return lost("its last step was run: it has ended")
    if step.number not in (None, standing.step + 1):
        return Refusal(
            Code.SESSION_STEP,
            f"step {step.number}",
            f"step {standing.step + 1}, or the very request of step {standing.step} again",
            "send steps in order; leave `sequence_step` out if you do not count them",
        )
    return Run(standing.state, standing.step + 1, standing.run, standing.hands)


def _is_last(step: Step, standing: Standing) -> bool:
    """Whether it is asked for again."""
    return step.token == standing.token or (step.number == standing.step and step.asked == standing.asked)


def _begin(step: Step) -> Run | Refusal:
    if step.number not in (None, 1):
        found = f"step {step.number} with sequence_start"
        return Refusal(Code.SESSION_STEP, found, "step 1", "count the steps of each session from 1")
    return Run(None, 1, step.token)


def lost(found: str) -> Refusal:
    return Refusal(
        Code.SESSION_LOST, found, "a session whose state is still there", "begin it anew: send sequence_start"
    )


def ran(run: Run, step: Step, assignment: str, state: State, answer: bytes, now: Elapsed) -> Owned:
    """After a step was run."""
    standing = Standing(run.run, run.number, state, step.token, step.asked, answer, step.end, run.hands)
    return Owned(assignment, standing, now)


# -- going elsewhere ---------------------------------------------------------------------------------------------------

OFFERED_S: Final = Seconds(30.0)
"""What was offered and not committed is forgotten after this: its giver has kept it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An offer was taken; `entry` is what is known from now on."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Newer:
    """Another session of that name is here that was used since: the one that is offered is of no use any more."""


def handed(standing: Standing) -> Standing:
    """As it is offered to another front."""
    return replace(standing, hands=standing.hands + 1)


def offered(
    entry: Entry | None,
    standing: Standing,
    assignment: str,
    giver: Giver,
    now: Elapsed,
    idle_s: Seconds = Seconds(0.0),
    *,
    busy: bool = False,
) -> Taken | Newer | Refusal:
    """entry: what the receiver knows. An offer that comes late, by a handover that it has seen the session leave after,
    or of a step before one that it knows, changes nothing. Of two sessions of one name that whose client was heard last
    stays. idle_s: since the last step of what is offered. busy: a step of the one here runs now."""
    used_at = Elapsed(now - idle_s)
    fresh = Taken(Offered(assignment, giver, standing, Elapsed(now + OFFERED_S), used_at))
    match entry:
        case Owned(standing=held, used_at=here_at) if held.run != standing.run:
            return fresh if not busy and (held.ended or here_at < used_at) else Newer()
        case Owned(standing=held) if (held.hands, held.step) == (standing.hands, standing.step):
            return Taken(entry)
        case Owned(standing=held):
            return _stale(standing, held.hands)
        case Offered(standing=held) if held.run == standing.run and _place(standing) < _place(held):
            return _stale(standing, held.hands)
        case Left(run=run, hands=hands) if run == standing.run and standing.hands <= hands:
            return _stale(standing, hands)
        case _:
            return fresh


def _place(standing: Standing) -> tuple[int, int]:
    return standing.hands, standing.step


def _stale(standing: Standing, hands: int) -> Refusal:
    found = f"a session at step {standing.step}, handover {standing.hands}"
    return Refusal(Code.MESSAGE_REPLAYED, found, f"a later one than handover {hands}")


def committed(entry: Entry | None, run: str, hands: int) -> Owned | Refusal:
    """Its giver has let go of it by that handover."""
    match entry:
        case Offered(assignment=assignment, standing=held) if (held.run, held.hands) == (run, hands):
            return Owned(assignment, held, entry.used_at)
        case Owned(standing=held) if (held.run, held.hands) == (run, hands):
            return entry
        case _:
            return lost("it was offered too long ago, or not at all")


def let_go(entry: Owned, to: Handover, now: Elapsed) -> Left:
    """From now on it is the receiver's."""
    return Left(entry.standing.run, entry.standing.hands + 1, to, now)


# -- bounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one front. session_bytes: of state and last answer. answer_bytes: an answer beyond is not kept. idle_s: one
    that has no step for so long is forgotten."""

    number: int = 4096
    per_tenant: int = 2048
    total_bytes: int = 256 * 2**20
    tenant_bytes: int = 128 * 2**20
    session_bytes: int = SESSION_BYTES
    answer_bytes: int = 2**20
    idle_s: float = 600.0
    ended_s: float = 30.0


def outlived(entry: Entry, now: Elapsed, limits: Limits) -> bool:
    """Whether it is to be forgotten."""
    match entry:
        case Owned(standing=standing, used_at=used_at):
            return now >= used_at + (limits.ended_s if standing.ended else limits.idle_s)
        case Offered(until=until):
            return now >= until
        case Left(since=since):
            return now >= since + limits.idle_s


def room(number: int, of_tenant: int, held_bytes: int, limits: Limits) -> Refusal | None:
    """Whether another session may begin beside those."""
    found = (
        f"{number} sessions" if number >= limits.number
        else f"{of_tenant} sessions of the tenant" if of_tenant >= limits.per_tenant
        else f"{held_bytes} bytes of state" if held_bytes >= limits.total_bytes
        else ""
    )  # fmt: skip
    if not found:
        return None
    return Refusal(Code.OVERLOADED, found, "room for another", "end sessions with sequence_end, or add replicas")


def fits(size: int, of_tenant: int, held_bytes: int, limits: Limits) -> Refusal | None:
    """Whether a session of `size` bytes is kept beside the bytes of its tenant's others, and of all others."""
    if size > limits.session_bytes:
        return Refusal(
            Code.SESSION_INVALID,
            f"a session of {size} bytes",
            f"at most {limits.session_bytes}",
            "end it before its state grows so large, or take a model with less state",
        )
    if of_tenant + size <= limits.tenant_bytes and held_bytes + size <= limits.total_bytes:
        return None
    found = f"{of_tenant} bytes of the tenant's other sessions, {held_bytes} of all others"
    return Refusal(Code.OVERLOADED, found, f"room for {size}", "end sessions with sequence_end, or add replicas")


def moved_within(entry: Owned, assignment: str) -> Owned:
    """To another replica of this very node: the front has it before and after."""
    return replace(entry, assignment=assignment)
