from shoal.coordinator.core.workloads.model import Decision, World
from shoal.types.units import Elapsed, Wall


def decide(world: World, now: Elapsed, wall: Wall) -> Decision:
    """One step of the region: what broke, where things shall run (`place`), what to do next (`reconcile`), and routes.

    Pure. The caller persists `decision.desired` where it differs (new generation) with `decision.memory` and the events
    in one transaction, then sends. Called again with what it answered and the same fleet, it changes nothing.
    """
    raise NotImplementedError
