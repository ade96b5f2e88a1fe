"""Whether a decision about what changed is the one that a decision about everything would have been."""

from dataclasses import replace

from shoal.coordinator.core.workloads.model import Decision, DesiredContent, RegionState


def differences(world: RegionState, decision: Decision, whole: Decision) -> tuple[str, ...]:
    """In what they differ: nodes, and names of what is remembered. Empty: in nothing. What triggers of moves remember
    is left out."""
    found = [
        f"node {node}"
        for node, content in sorted(whole.desired.items())
        if (decision.desired.get(node) or world.desired.get(node, DesiredContent())) != content
    ]
    before, after = (replace(each.memory, pending={}) for each in (decision, whole))
    if before != after:
        names = ("issued", "marks", "tables", "crashes", "measured", "short", "without_ready", "idle", "unloadable")
        found += [name for name in (*names, "over_budget") if getattr(before, name) != getattr(after, name)]
    if sorted(map(repr, decision.waits)) != sorted(map(repr, whole.waits)):
        found.append("waits")
    return tuple(found)
