"""Desired x running: what to begin, resume, drain and forget; which bytes to keep."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.core import assignment as machine
from shoal.types.assignment import Assignment, DesiredSet


@dataclass(frozen=True, slots=True)
class Plan:
    """begin: unknown here. resume: known, with the terms of now. drain: ids not wanted (any more). forget: ids that are
    neither wanted nor there."""

    begin: tuple[Assignment, ...]
    resume: tuple[Assignment, ...]
    drain: tuple[str, ...]
    forget: tuple[str, ...]


def plan(wanted: tuple[Assignment, ...], running: Mapping[str, machine.State]) -> Plan:
    """Level-based: the same inputs give the same plan, and carrying it out leaves nothing to do but `forget`.

    An id whose model or device changed (against its contract) is drained first and begun again once it is gone.
    """
    begin: list[Assignment] = []
    resume: list[Assignment] = []
    drain: list[str] = []
    for asked in wanted:
        state = running.get(asked.id)
        if state is None:
            if not asked.draining:
                begin.append(asked)
        elif asked.draining or not (isinstance(state, machine.Gone) or _same_meaning(state.asked, asked)):
            drain.append(asked.id)
        elif state.asked != asked or isinstance(state, machine.Gone | machine.Draining):
            resume.append(asked)
    named = {asked.id for asked in wanted}
    unwanted = {name: state for name, state in running.items() if name not in named}
    drain += [name for name, state in unwanted.items() if not isinstance(state, machine.Gone)]
    forget = tuple(name for name, state in unwanted.items() if isinstance(state, machine.Gone))
    return Plan(tuple(begin), tuple(resume), tuple(name for name in drain if not _ending(running[name])), forget)


def _ending(state: machine.State) -> bool:
    """One that drains to be staged goes on to its end only when that is not wanted any more."""
    return isinstance(state, machine.Gone) or (isinstance(state, machine.Draining) and not state.asked.staged)


def _same_meaning(held: Assignment, asked: Assignment) -> bool:
    return (held.workload, held.model, held.device, held.provider, held.precision) == (
        asked.workload,
        asked.model,
        asked.device,
        asked.provider,
        asked.precision,
    )


def pinned(desired: DesiredSet | None, running: Mapping[str, machine.State]) -> frozenset[str]:
    """Digests that the cache must keep: asked for, assigned, or in use."""
    held = [state.asked for state in running.values() if not isinstance(state, machine.Gone)]
    wanted = [*held, *(desired.assignments if desired is not None else ())]
    packs = {asked.verification.pack for asked in wanted if asked.verification is not None and asked.verification.pack}
    pins = desired.pins if desired is not None else ()
    return frozenset({*pins, *packs, *(asked.model for asked in wanted)})
