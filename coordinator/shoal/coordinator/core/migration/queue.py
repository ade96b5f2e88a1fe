"""Moves that an operator asked for and that wait until what refuses them is gone (`shoal migrate --queue`).

A queued move is no migration: it holds no capacity, lifts no block and changes no decision. It is a request that is
made again, by the same path as a user's, once `can-move` says yes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.migration.model import NEVER, ReplicaPlace
from shoal.coordinator.core.placement.model import Aim
from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds
from shoal.types.workload import WorkloadKey

QUEUED: Final = "queued"
"""The stage of a move that waits here, beside those of a migration."""
WAIT_S: Final = Seconds(3600.0)
"""A move that could not begin for this long is given up. Time in which no coordinator leads does not count."""
LONGEST_S: Final = Seconds(24 * 3600.0)
"""The same by the wall clock, by which all time counts: a restored copy of the store begins nothing of days ago."""
MOST_OF_TENANT: Final = 16
"""Moves of one tenant that may wait at a time."""
MOST: Final = 256
"""Moves of all tenants that may wait at a time: each is looked at again and again."""
KEPT: Final = 100
"""Moves that ended here without having begun, the newest, are kept for `shoal get migrations`."""
RETRY_S: Final = Seconds(2.0)
"""A move is looked at again after this long, if no other one is due before it."""
LOOK_SHARE: Final = 0.1
"""Looks take at most this share of one processor: after one that took t of it, the next one waits t / share."""


@dataclass(frozen=True, slots=True)
class DocumentRevision:
    """Which revision of a document it is."""

    # As in StoredDocument.
    number: int
    # When it was applied.
    applied_at: Wall

    def is_of_another(self, later: "DocumentRevision") -> bool:
        """Whether the document was deleted meanwhile and applied anew: numbers rise otherwise, and stand for one
        text each."""
        return later.number < self.number or (later.number == self.number and later.applied_at != self.applied_at)


@dataclass(frozen=True, slots=True)
class QueuedMove:
    """A move that waits, or that ended here without having begun. As it is stored."""

    # Its own, and that of the migration that it becomes.
    id: str
    # Workload of the replica.
    workload: WorkloadKey
    # Operator who asked for it.
    actor: str
    # Where it is to go.
    aim: Aim
    # Assignment that is to move; empty: whichever is not at the aim when it begins.
    replica: str
    # The replica that would have moved when it was asked for.
    source: ReplicaPlace
    # What refused it when it was asked for.
    reason: Refusal
    # When it was asked for.
    at: Wall
    # The same by the region's clock.
    since: Elapsed
    # When it is given up.
    until: Elapsed
    # Why it ended without having begun; None while it waits.
    ended: Refusal | None = None
    # When it ended; NEVER while it waits.
    ended_at: Wall = NEVER
    # Of the workload's document when it was asked for; None: the workload is another region's, which has none here.
    document: DocumentRevision | None = None

    @property
    def stage(self) -> str:
        return QUEUED if self.ended is None else "aborted"

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    def waiting_time(self, now: Elapsed) -> str:
        return f"queued for {show_seconds(Seconds(max(0.0, now - self.since)))}"


def waiting(queue: Collection[QueuedMove]) -> list[QueuedMove]:
    """Those that wait, oldest first."""
    return sorted((each for each in queue if not each.is_over), key=lambda each: (each.since, each.id))


def entry_refusal(queue: Collection[QueuedMove], key: WorkloadKey, replica: str) -> Refusal | None:
    """Why one more move of a workload may not wait; None: it may. replica: as in QueuedMove.

    It names only moves of the same tenant, because others are none of the caller's business.
    """
    now = waiting(queue)
    mine = [each for each in now if each.workload.tenant == key.tenant]
    same = next(
        (each for each in mine if each.workload == key and (not replica or each.replica in ("", replica))), None
    )
    if same is not None:
        found = f"{same.id} of {key} waits already, to {same.aim.where}"
        return Refusal(Code.CONFLICT, found, "one move of a replica in the queue", cancel_command(same))
    if len(mine) >= MOST_OF_TENANT:
        found, asked = f"{len(mine)} moves of tenant {key.tenant} wait", f"fewer than {MOST_OF_TENANT}"
        return Refusal(Code.QUEUE_FULL, found, asked, f"wait, or take one back: {cancel_command(mine[0])}")
    if len(now) >= MOST:
        found, asked = f"{len(now)} moves of the region wait", f"fewer than {MOST}"
        remedy = f"take one back: {cancel_command(mine[0])}" if mine else "ask again later"
        return Refusal(Code.QUEUE_FULL, found, asked, remedy)
    return None


def cancel_command(queued: QueuedMove) -> str:
    """The command that takes it back, for whoever may name its tenant."""
    tenant = "" if queued.workload.tenant == "default" else f" --tenant {queued.workload.tenant}"
    return f"shoal migrate {queued.workload.name} --cancel {queued.id}{tenant}"


def expiry_refusal(queued: QueuedMove, reason: Refusal, now: Elapsed, wall: Wall) -> Refusal | None:
    """Why a move that never could begin is given up; None: it waits on. reason: what refused it last."""
    if now >= queued.until:
        found = f"it could not begin within {show_seconds(WAIT_S)}: {reason}"
    elif wall >= queued.at + LONGEST_S:
        found = f"it was asked for more than {show_seconds(LONGEST_S)} ago: {reason}"
    else:
        return None
    return Refusal(Code.MOVE_TIMEOUT, found, "", "ask again when there is room, or aim elsewhere")


def next_look(
    queue: Collection[QueuedMove], looked_at: Mapping[str, Elapsed], turns: Mapping[str, Elapsed], now: Elapsed
) -> QueuedMove | None:
    """The waiting move whose turn it is; None: none is due. looked_at: by id, when it was looked at last. turns: by
    tenant, when one of its moves was.

    The tenant whose turn was longest ago goes first, so that one with many moves keeps no other one waiting. Of its
    moves, the one that was looked at longest ago, so that none keeps the others from beginning; of those that never
    were, the oldest.
    """
    never = float("-inf")
    due = [each for each in waiting(queue) if now >= looked_at.get(each.id, never) + RETRY_S]
    return min(
        due, key=lambda each: (turns.get(each.workload.tenant, never), looked_at.get(each.id, never)), default=None
    )


def to_forget(queue: Collection[QueuedMove]) -> list[str]:
    """Ids of those that are over and no longer kept."""
    over = sorted((each for each in queue if each.is_over), key=lambda each: (each.ended_at, each.id))
    return [each.id for each in over[: max(0, len(over) - KEPT)]]
