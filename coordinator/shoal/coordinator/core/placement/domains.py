"""What replicas of one workload must differ in: their device, their node, or the value of a label of their node."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from shoal.coordinator.core.fleet.state import NodeState
from shoal.types.workload import Spread

Domain = tuple[str, ...]
"""One device, one node, or the nodes with one value of a label. Equal domains have equal names."""
ANYWHERE: Final[Domain] = ()
"""The domain of every place where replicas may share everything."""
_WORDS: Final = frozenset(Spread)


class HasDomain(Protocol):
    """A place, or a replica that has one."""

    def domain(self, spread: str) -> Domain: ...


def is_label(spread: str) -> bool:
    """Whether replicas must differ in the value of a node label."""
    return spread not in _WORDS


def domain_of(spread: str, state: NodeState, device: str) -> Domain:
    """The domain of a device. A node without the label counts as one of its own: it takes nothing new, but what runs
    there does not have to leave because a label was removed."""
    match spread:
        case Spread.NONE:
            return ANYWHERE
        case Spread.DEVICE:
            return "device", state.name, device
        case Spread.NODE:
            return "node", state.name
        case label:
            value = state.node.labels.get(label)
            return ("node", state.name) if value is None else (label, value)


def taken_domains(picks: Iterable[HasDomain], spread: str) -> set[Domain]:
    """The domains of these replicas; empty where replicas may share everything."""
    return {pick.domain(spread) for pick in picks} - {ANYWHERE}


def weaker(spread: str) -> Sequence[Spread]:
    """Every weaker rule, the strongest first. Nodes are weaker than any label, because a node has one value of it."""
    order = (Spread.NODE, Spread.DEVICE, Spread.NONE)
    return order if is_label(spread) else order[order.index(Spread(spread)) + 1 :]


def show_spread(spread: str) -> str:
    """The rule as a policy writes it."""
    return f"{{over: {spread}}}" if is_label(spread) else str(spread)
