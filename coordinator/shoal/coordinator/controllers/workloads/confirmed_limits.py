"""Which nodes hold the limits of tenants that were decided last.

In a large region some desired set is always on its way, for instance because clients ask for another route. The shares
of a quota do not wait for that: a node has confirmed its limits with any set since these changed.
"""

from collections.abc import Container, Mapping

from shoal.coordinator.core.fleet.state import Fleet
from shoal.types.assignment import DesiredSet


class ConfirmedLimits:
    """Follows the desired sets of a region."""

    def __init__(self) -> None:
        self._limited_at: dict[str, int] = {}
        """The generation in which each node's limits changed last, or with which following it began."""

    def on_change(self, before: Mapping[str, DesiredSet], changed: Mapping[str, DesiredSet]) -> None:
        """changed: sets that were stored now, and replace those of `before`."""
        for node, desired in changed.items():
            known = before.get(node)
            if known is None or node not in self._limited_at or known.tenants != desired.tenants:
                self._limited_at[node] = desired.version.generation

    def forget(self, node: str) -> None:
        """The node is gone, or its set was replaced by another that this does not follow."""
        self._limited_at.pop(node, None)

    def forget_all(self) -> None:
        self._limited_at.clear()

    def nodes(self, fleet: Fleet, desired: Mapping[str, DesiredSet]) -> Container[str]:
        """Nodes that confirmed their limits. desired: all sets, as decided last; not copied."""
        return _ConfirmedNodes(fleet, desired, self._limited_at)


class _ConfirmedNodes(Container[str]):
    def __init__(self, fleet: Fleet, desired: Mapping[str, DesiredSet], limited_at: Mapping[str, int]) -> None:
        """limited_at: as in ConfirmedLimits; of a node that is left out, the generation of its set."""
        self._fleet = fleet
        self._desired = desired
        self._limited_at = limited_at

    def __contains__(self, node: object) -> bool:
        state, desired = self._fleet.nodes.get(str(node)), self._desired.get(str(node))
        if state is None or desired is None or state.version is None:
            return False
        least = self._limited_at.get(desired.node, desired.version.generation)
        return state.version.history == desired.version.history and state.version.generation >= least
