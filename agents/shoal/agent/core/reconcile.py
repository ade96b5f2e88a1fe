"""Compare the desired set with what runs: what to begin, resume, drain and forget, and which bytes to keep."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.core.assignment import states
from shoal.types.assignment import Assignment, DesiredSet


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    """What to do so that the running assignments match the desired ones."""

    # Assignments that are not known here.
    begin: tuple[Assignment, ...]
    # Known assignments whose terms changed, or that were gone or draining.
    resume: tuple[Assignment, ...]
    # Ids that are running and are not desired, desired as draining, or desired with another model or device.
    drain: tuple[str, ...]
    # Ids that are neither desired nor running.
    forget: tuple[str, ...]


def plan(wanted: tuple[Assignment, ...], running: Mapping[str, states.State]) -> ReconcilePlan:
    """Level-based: the same inputs give the same plan, and after performing it only `forget` is left.

    An id whose model or device changed (against its contract) is drained first, and begun again once it is gone.
    """
    begin: list[Assignment] = []
    resume: list[Assignment] = []
    drain: list[str] = []
    for asked in wanted:
        state = running.get(asked.id)
        if state is None:
            if not asked.draining:
                begin.append(asked)
        elif asked.draining or not (isinstance(state, states.Gone) or _is_same_replica(state.assignment, asked)):
            drain.append(asked.id)
        elif state.assignment != asked or isinstance(state, states.Gone | states.Draining):
            resume.append(asked)
    named = {asked.id for asked in wanted}
    unwanted = {name: state for name, state in running.items() if name not in named}
    drain += [name for name, state in unwanted.items() if not isinstance(state, states.Gone)]
    forget = tuple(name for name, state in unwanted.items() if isinstance(state, states.Gone))
    return ReconcilePlan(
        tuple(begin), tuple(resume), tuple(name for name in drain if not _is_ending(running[name])), forget
    )


def _is_ending(state: states.State) -> bool:
    """Whether a drain need not be requested. One that drains to be staged is drained further if it is not desired."""
    return isinstance(state, states.Gone) or (isinstance(state, states.Draining) and not state.assignment.staged)


def _is_same_replica(held: Assignment, asked: Assignment) -> bool:
    return (held.workload, held.model, held.device, held.provider, held.precision) == (
        asked.workload,
        asked.model,
        asked.device,
        asked.provider,
        asked.precision,
    )


def pinned_digests(desired: DesiredSet | None, running: Mapping[str, states.State]) -> frozenset[str]:
    """Digests that the cache must keep: pinned by the desired set, assigned, or in use."""
    held = [state.assignment for state in running.values() if not isinstance(state, states.Gone)]
    wanted = [*held, *(desired.assignments if desired is not None else ())]
    packs = {asked.verification.pack for asked in wanted if asked.verification is not None and asked.verification.pack}
    pins = desired.pins if desired is not None else ()
    return frozenset({*pins, *packs, *(asked.model for asked in wanted)})
