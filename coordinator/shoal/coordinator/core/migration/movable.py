"""Which replica of a workload a requested move takes, and why none can go. For requests and for the queue of moves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.placement.model import Aim
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.workload import WorkloadKey

HeldReplica = tuple[str, Assignment]
"""A replica with its node."""


@dataclass(frozen=True, slots=True)
class MoveObstacle:
    """Why no replica can move there now."""

    refusal: Refusal
    # Waiting does not help: the replica is gone, or there is nothing to move.
    is_final: bool = False


def held_replicas(key: WorkloadKey, replica: str, held: Iterable[HeldReplica]) -> list[HeldReplica]:
    """The workload's replicas that take requests, or the named one alone."""
    return [
        (node, one)
        for node, one in held
        if one.workload == key and not (one.draining or one.standby) and replica in ("", one.id)
    ]


def is_there(each: HeldReplica, aim: Aim) -> bool:
    """Whether a replica is where the aim wants it. Without a node, no replica is."""
    node, one = each
    return bool(aim.node) and aim.allows(node, one.device, one.variant)


def region_aim_refusal(aim: Aim, replica: str = "") -> Refusal | None:
    """Why a move to the region that `aim` names as its node cannot be asked for like this; None: it can."""
    if not (aim.device or replica):
        return None
    found = f"{f'replica {replica}' if replica else f'device {aim.device}'} with a region"
    return Refusal(Code.FIELD_INVALID, found, "a region alone: it has all of a workload, where it likes")


def runs_here(key: WorkloadKey) -> Refusal:
    """Why it cannot come home."""
    return Refusal(Code.CONFLICT, f"{key} runs at home", "one that another region runs")


def runs_elsewhere(key: WorkloadKey, region: str, local: str) -> Refusal:
    """Why no replica of it can move to a node here."""
    return Refusal(Code.NOT_FOUND, f"{region} has {key}", "one that runs here", _way_back(local))


def is_delegated(key: WorkloadKey, region: str, local: str) -> Refusal:
    """Why it cannot go to a further region."""
    return Refusal(Code.CONFLICT, f"{region} has {key} already", "one that home runs", _way_back(local))


def keeps_sessions(key: WorkloadKey) -> Refusal:
    """Why it cannot go to another region."""
    remedy = "sessions move between nodes of a region only"
    return Refusal(Code.CONFLICT, f"{key} keeps state for its sessions", "a workload without", remedy)


def _way_back(local: str) -> str:
    return f"bring it home first: --to {local}"


def movable_replica(
    key: WorkloadKey,
    aim: Aim,
    replica: str,
    held: Sequence[HeldReplica],
    live: Sequence[Migration],
    fleet: Fleet,
) -> HeldReplica | MoveObstacle:
    """The replica that moves: `replica`, else the first that is not at the aim, does not move and serves.

    held: every assignment of the region, by node. live: migrations that are not over.
    """
    whole = [each.id for each in live if each.is_cross_region and each.workload == key]
    if whole:
        found = f"{key} moves as a whole: {whole[0]}"
        return MoveObstacle(Refusal(Code.CONFLICT, found, "one that does not", "wait for it"))
    mine = held_replicas(key, replica, held)
    if not mine:
        found = f"no replica {replica} of {key}".replace("  ", " ")
        # Another one may take its place, as after preemption; the named one does not come back.
        remedy = "`shoal get placements` lists them" if replica else "`shoal explain` says why it has none"
        return MoveObstacle(Refusal(Code.NOT_FOUND, found, "one that runs here", remedy), is_final=bool(replica))
    bound = {
        name: each.id
        for each in live
        for name in (each.source.assignment, each.target.assignment if each.target is not None else "")
    }
    free = [each for each in mine if each[1].id not in bound]
    if not free:
        names = ", ".join(sorted({bound[one.id] for _, one in mine}))
        found = f"{key} moves already: {names}"
        remedy = "wait for its end, or let this move wait for it: shoal migrate --queue"
        return MoveObstacle(Refusal(Code.CONFLICT, found, "a replica that does not", remedy))
    away = [each for each in free if not is_there(each, aim)]
    if not away:
        found = f"{key} is on {free[0][0]}/{free[0][1].device} already"
        waits = len(free) < len(mine) and not all(is_there(each, aim) for each in mine)
        refusal = Refusal(Code.CONFLICT, found, "another node or device", "see `shoal get devices`")
        return MoveObstacle(refusal, is_final=not waits)
    spare = _standby_at(key, aim, held, fleet)
    if spare is not None:
        found = f"the standby of {key} is on {aim.node}/{spare.device}"
        remedy = "aim elsewhere, or apply it without `standby`"
        return MoveObstacle(Refusal(Code.CONFLICT, found, "another node or device", remedy), is_final=True)
    serving = [each for each in away if _serves(each, fleet)]
    if not serving:
        found = f"no replica of {key} serves that could move"
        remedy = "ask again when it is; `shoal explain` says what it waits for"
        return MoveObstacle(Refusal(Code.MODEL_NOT_READY, found, "one that is ready", remedy))
    return serving[0]


def list_held(desired: Mapping[str, Sequence[Assignment]]) -> list[HeldReplica]:
    """Every assignment with its node, by node."""
    return [(node, one) for node, assignments in sorted(desired.items()) for one in assignments]


def _standby_at(key: WorkloadKey, aim: Aim, held: Iterable[HeldReplica], fleet: Fleet) -> Assignment | None:
    """The workload's standby on the only device that the aim allows; None if there is none."""
    state = fleet.nodes.get(aim.node)
    if state is None:
        return None
    devices = {each.name for each in state.node.devices if aim.device in ("", each.name)}
    spares = (
        one for node, one in held if node == aim.node and one.workload == key and one.standby and not one.draining
    )
    return next((each for each in spares if devices == {each.device}), None)


def _serves(held: HeldReplica, fleet: Fleet) -> bool:
    node, one = held
    state = fleet.nodes.get(node)
    observed = state.observed.get(one.id) if state is not None else None
    return observed is not None and observed.phase is Phase.READY
