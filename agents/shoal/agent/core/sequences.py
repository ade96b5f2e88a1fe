"""Sessions of stateful workloads, as the front that owns them keeps them: what a step may do, how a session moves.

A session is a sequence of requests (`sequence_id`) whose state stays at one front. Every step has a number, and the
valid state is the one after the last step. A session moves to another front between two steps:

- The source offers it. The receiver keeps it and does not run it.
- The source releases it for good.
- The source commits the offer, and the receiver runs it.

So a session never runs at two fronts. A late or repeated message is recognised by the session's run and step.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shoal.types.codes import Code, Refusal
from shoal.types.migration import Handover, SessionSource
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.types.workload import SESSION_BYTES, WorkloadKey


class SequenceKey(NamedTuple):
    """The identity of a session. `sequence` is the id that its client gave it."""

    workload: WorkloadKey
    sequence: str


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a session's state. `content` is little-endian and row-major, as the protocol's raw contents."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


SessionState = Mapping[str, StateTensor]
"""State tensors by the name of the input that takes them."""


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One step that a client requests."""

    # Identifies the client's call; the same however often the call arrives here.
    token: str
    # SHA-256 of the request without its id.
    request_sha256: bytes
    # Whether it begins the session (sequence_start).
    start: bool
    # Whether it ends the session (sequence_end).
    end: bool
    # Number of the step as the client counts, from 1; None where it does not count.
    number: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A session between two steps."""

    # Identifies this session among all that used its name.
    run_id: str
    # Steps run so far.
    step: int
    # State after the last step; empty after the session ended.
    state: SessionState
    # Token of the last step.
    token: str
    # SHA-256 of the last step's request.
    request_sha256: bytes
    # Answer of the last step; empty where it is too large to keep, or there was no room for it.
    answer: bytes
    # Ended by its client. It is kept for a while, so that a repeated last step can be answered.
    is_ended: bool = False
    # Moves to another front so far; with `step`, this tells a late message from a new one.
    handovers: int = 0

    @property
    def size(self) -> Bytes:
        return Bytes(len(self.answer) + sum(len(tensor.content) for tensor in self.state.values()))


@dataclass(frozen=True, slots=True)
class OwnedSession:
    """A session that runs here, on the worker of `assignment`."""

    assignment: str
    snapshot: SessionSnapshot
    used_at: Elapsed


@dataclass(frozen=True, slots=True)
class OfferedSession:
    """A session offered by another front, not yet run here: the source may still own it."""

    # The replica here that will run it.
    assignment: str
    # The node that may offer it, and its migration. It may commit even if the migration has been reversed since.
    source: SessionSource
    # The session after its last step, with the handover counted.
    snapshot: SessionSnapshot
    # When an uncommitted offer is forgotten, elapsed clock.
    until: Elapsed
    # When its last step ran, elapsed clock here.
    used_at: Elapsed


@dataclass(frozen=True, slots=True)
class MovedSession:
    """A session that moved to another replica. It never runs here again, unless a later handover brings it back."""

    # Identifies the session among all that used its name.
    run_id: str
    # Number of the handover by which it left.
    handovers: int
    # The replica that has it.
    to: Handover
    # When it left, elapsed clock.
    since: Elapsed


SessionEntry = OwnedSession | OfferedSession | MovedSession


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the step."""

    # State before the step; None at a session's first step, where it is all zeros.
    state: SessionState | None
    # Number of the step, from 1.
    step_number: int
    # Identifies the session among all that used its name.
    run_id: str
    # Moves of the session to another front so far.
    handovers: int = 0


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    answer: bytes


@dataclass(frozen=True, slots=True)
class Redirect:
    to: Handover


@dataclass(frozen=True, slots=True)
class AwaitHandover:
    """It is not decided yet whether the session runs here."""


def decide_step(
    entry: SessionEntry | None, step: SessionStep, listed: Container[str] | None = None
) -> RunStep | ReplayAnswer | Redirect | AwaitHandover | Refusal:
    """What to do with a step that arrived here.

    `entry` is what is known of its session. `listed` are the replicas that exist, None for any. If the replica that a
    session moved to is gone, the next session of its name begins at the front that receives its first step.
    """
    match entry:
        case OwnedSession(snapshot=standing):
            return _decide_owned(standing, step)
        case OfferedSession(snapshot=standing) if not step.start or _is_last(step, standing):
            return AwaitHandover()
        case OfferedSession():
            return _begin(step)  # the client starts a new session of this name, so the offered one is of no use
        case MovedSession(to=to) if step.start and listed is not None and to.assignment not in listed:
            return _begin(step)
        case MovedSession(to=to):
            return Redirect(to)
        case None if step.start:
            return _begin(step)
        case None:
            return lost_session_refusal("no session of this name is here")


def _decide_owned(snapshot: SessionSnapshot, step: SessionStep) -> RunStep | ReplayAnswer | Refusal:
    if _is_last(step, snapshot) and not snapshot.answer:
        found = "the last step again, whose answer was not kept"
        return Refusal(Code.SESSION_STEP, found, f"step {snapshot.step + 1}", "go on with the next step, or begin anew")
    if _is_last(step, snapshot):
        return ReplayAnswer(snapshot.answer)
    if step.start:
        return _begin(step)
    if snapshot.is_ended:
        return lost_session_refusal("its last step was run: it has ended")
    if step.number not in (None, snapshot.step + 1):
        return Refusal(
            Code.SESSION_STEP,
            f"step {step.number}",
            f"step {snapshot.step + 1}, or the very request of step {snapshot.step} again",
            "send steps in order; leave `sequence_step` out if you do not count them",
        )
    return RunStep(snapshot.state, snapshot.step + 1, snapshot.run_id, snapshot.handovers)


def _is_last(step: SessionStep, snapshot: SessionSnapshot) -> bool:
    """Whether the step is the last one that ran, requested again."""
    return step.token == snapshot.token or (
        step.number == snapshot.step and step.request_sha256 == snapshot.request_sha256
    )


def _begin(step: SessionStep) -> RunStep | Refusal:
    if step.number not in (None, 1):
        found = f"step {step.number} with sequence_start"
        return Refusal(Code.SESSION_STEP, found, "step 1", "count the steps of each session from 1")
    return RunStep(None, 1, step.token)


def lost_session_refusal(found: str) -> Refusal:
    return Refusal(
        Code.SESSION_LOST, found, "a session whose state is still there", "begin it anew: send sequence_start"
    )


def complete_step(
    run: RunStep, step: SessionStep, assignment: str, state: SessionState, answer: bytes, now: Elapsed
) -> OwnedSession:
    """The session after its step ran."""
    standing = SessionSnapshot(
        run.run_id, run.step_number, state, step.token, step.request_sha256, answer, step.end, run.handovers
    )
    return OwnedSession(assignment, standing, now)


# -- handover ----------------------------------------------------------------------------------------------------------

OFFER_TTL_S: Final = Seconds(30.0)
"""Seconds after which an offer that was not committed is forgotten: its source has kept the session."""


@dataclass(frozen=True, slots=True)
class OfferAccepted:
    """The offer is accepted; `entry` is the session's new state here."""

    entry: SessionEntry


@dataclass(frozen=True, slots=True)
class OfferSuperseded:
    """A session of that name was used here more recently, so the offered one is of no use."""


def with_handover(snapshot: SessionSnapshot) -> SessionSnapshot:
    """The snapshot as it is offered to another front, with the handover counted."""
    return replace(snapshot, handovers=snapshot.handovers + 1)


def receive_offer(
    entry: SessionEntry | None,
    snapshot: SessionSnapshot,
    assignment: str,
    source: SessionSource,
    now: Elapsed,
    idle_s: Seconds = Seconds(0.0),
    *,
    busy: bool = False,
) -> OfferAccepted | OfferSuperseded | Refusal:
    """Decide on an offered session.

    - An offer changes nothing if it is late: the session has since left by that handover or a later one, or a
      later step is known.
    - Of two sessions of one name, the one whose client was active last stays.

    `entry` is what the receiver knows. `idle_s` is the time since the offered session's last step. `busy` is True while
    a step of the session here runs.
    """
    used_at = Elapsed(now - idle_s)
    fresh = OfferAccepted(OfferedSession(assignment, source, snapshot, Elapsed(now + OFFER_TTL_S), used_at))
    match entry:
        case OwnedSession(snapshot=held, used_at=here_at) if held.run_id != snapshot.run_id:
            return fresh if not busy and (held.is_ended or here_at < used_at) else OfferSuperseded()
        case OwnedSession(snapshot=held) if (held.handovers, held.step) == (snapshot.handovers, snapshot.step):
            return OfferAccepted(entry)
        case OwnedSession(snapshot=held):
            return _stale_refusal(snapshot, held.handovers)
        case OfferedSession(snapshot=held) if held.run_id == snapshot.run_id and _progress(snapshot) < _progress(held):
            return _stale_refusal(snapshot, held.handovers)
        case MovedSession(run_id=run, handovers=hands) if run == snapshot.run_id and snapshot.handovers <= hands:
            return _stale_refusal(snapshot, hands)
        case _:
            return fresh


def _progress(snapshot: SessionSnapshot) -> tuple[int, int]:
    return snapshot.handovers, snapshot.step


def _stale_refusal(snapshot: SessionSnapshot, handovers: int) -> Refusal:
    found = f"a session at step {snapshot.step}, handover {snapshot.handovers}"
    return Refusal(Code.MESSAGE_REPLAYED, found, f"a later one than handover {handovers}")


def commit_offer(entry: SessionEntry | None, run_id: str, handovers: int) -> OwnedSession | Refusal:
    """The session after its source released it by handover number `handovers`."""
    match entry:
        case OfferedSession(assignment=assignment, snapshot=held) if (held.run_id, held.handovers) == (
            run_id,
            handovers,
        ):
            return OwnedSession(assignment, held, entry.used_at)
        case OwnedSession(snapshot=held) if (held.run_id, held.handovers) == (run_id, handovers):
            return entry
        case _:
            return lost_session_refusal("it was offered too long ago, or not at all")


def release(entry: OwnedSession, to: Handover, now: Elapsed) -> MovedSession:
    """The session after it was offered: from now on the receiver owns it."""
    return MovedSession(entry.snapshot.run_id, entry.snapshot.handovers + 1, to, now)


# -- bounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one front."""

    # Sessions of all tenants that have not ended; as many that have are kept.
    max_sessions: int = 4096
    # Sessions of one tenant, in the same way.
    per_tenant: int = 2048
    # Bytes of state and last answers, all tenants.
    total_bytes: int = 256 * 2**20
    # Bytes of state and last answers of one tenant.
    tenant_bytes: int = 128 * 2**20
    # Bytes of one session's state and last answer.
    session_bytes: int = SESSION_BYTES
    # Largest answer that is kept, bytes; a larger one cannot be answered again.
    answer_bytes: int = 2**20
    # Seconds without a step after which a session is forgotten.
    idle_s: float = 600.0
    # Seconds for which an ended session is kept, so that a repeated last step can be answered.
    ended_keep_s: float = 30.0

    def within(self, total: Bytes) -> "SessionLimits":
        """With at most `total` for all tenants, and half of it for one, and so for one session."""
        of_all = min(self.total_bytes, total)
        of_tenant = min(self.tenant_bytes, of_all // 2)
        of_session = min(self.session_bytes, of_tenant)
        return replace(self, total_bytes=of_all, tenant_bytes=of_tenant, session_bytes=of_session)


def is_expired(entry: SessionEntry, now: Elapsed, limits: SessionLimits) -> bool:
    """Whether the session's time here is over."""
    match entry:
        case OwnedSession(snapshot=standing, used_at=used_at):
            return now >= used_at + (limits.ended_keep_s if standing.is_ended else limits.idle_s)
        case OfferedSession(until=until):
            return now >= until
        case MovedSession(since=since):
            return now >= since + limits.idle_s


def check_room(number: int, of_tenant: int, held_bytes: int, limits: SessionLimits) -> Refusal | None:
    """None, or why no further session may begin. The counts are of the other sessions."""
    found = (
        f"{number} sessions" if number >= limits.max_sessions
        else f"{of_tenant} sessions of the tenant" if of_tenant >= limits.per_tenant
        else f"{held_bytes} bytes of state" if held_bytes >= limits.total_bytes
        else ""
    )  # fmt: skip
    if not found:
        return None
    return Refusal(Code.OVERLOADED, found, "room for another", "end sessions with sequence_end, or add replicas")


def check_size(size: int, of_tenant: int, held_bytes: int, limits: SessionLimits) -> Refusal | None:
    """None, or why a session of `size` bytes is not kept. The byte counts are of the tenant's others, and of all
    others."""
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


def with_assignment(entry: OwnedSession, assignment: str) -> OwnedSession:
    """The session at another replica of this node; the front owns it before and after."""
    return replace(entry, assignment=assignment)
