"""Events that nodes cause: by what they send, and by changes of their state."""

from collections.abc import Mapping
from typing import Final

from shoal.coordinator import metrics
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.state import LivenessChange, NodeState
from shoal.coordinator.core.placement.changes import is_same
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import UNREADABLE_DEVICE, Code
from shoal.types.link import NodeEvents
from shoal.types.units import show_seconds

SCALED_UP_EVENT: Final = "SCALED_UP"
EVENT_BURST: Final = 256
"""Event log entries that one node may cause at once: as many as an agent buffers while it is disconnected."""
EVENTS_PER_S: Final = 2.0
"""Entries a second that one node may cause after the burst."""
MESSAGE_MOST, SUBJECT_MOST = 512, 256
"""Characters kept of an agent's event message and of its subject."""
MOST_NODES: Final = 20_000
"""Nodes with a rate limit in memory: twice the number of links (`LINK_CONNECTIONS`)."""


class NodeEventLog:
    """Lets each node cause a limited number of entries."""

    def __init__(self, context: RegionContext) -> None:
        self._fence = context.fence
        self._clock = context.clock
        self._meter = context.meter
        self._limits = RateLimiter(EVENT_BURST, EVENTS_PER_S, MOST_NODES)

    async def record(self, node: str, message: NodeEvents) -> None:
        """Records an agent's events in its own name: only known codes, truncated, and within its rate limit."""
        told = [
            LogEvent(
                _agent_code(each.code), each.subject[:SUBJECT_MOST], each.message[:MESSAGE_MOST], f"agent {node}", node
            )
            for each in message.events
        ]
        taken = self.admit(node, told)
        if taken:
            await self._fence.note(*taken)
        for event in taken:
            if event.code == Code.FORWARD_DENIED:
                await self._fence.audit(event.actor, "DenyForward", event.subject, event.code)
        if len(taken) < len(told):
            bucket = self._limits.bucket_of(node, self._clock.now())
            if bucket.should_audit(self._clock.now()):
                await self._fence.audit(f"agent {node}", "Tell", "events", Code.OVERLOADED)

    def admit(self, node: str, events: list[LogEvent]) -> list[LogEvent]:
        """Those of the events that the node's rate limit allows now; the rest is counted."""
        bucket, now, taken = self._limits.bucket_of(node, self._clock.now()), self._clock.now(), list[LogEvent]()
        for event in events:
            if bucket.allows(now):
                bucket.spend(now)
                taken.append(event)
            else:
                self._meter.count(metrics.EVENTS_DROPPED, code=Code.OVERLOADED)
        return taken


def _agent_code(code: str) -> str:
    """Agents may use codes of types.codes only. Event names such as NODE_REVOKED are the coordinator's own."""
    return code if code in Code.__members__ else Code.CODE_UNKNOWN


def affects_decisions(before: NodeState, after: NodeState) -> bool:
    """Whether anything changed that decisions depend on, apart from what changes with every heartbeat."""
    return (
        before.has_full_status != after.has_full_status
        or before.sequence == 0
        or (before.version, before.front_ready, before.subscriptions)
        != (after.version, after.front_ready, after.subscriptions)
        or _reports_differently(before.observed, after.observed)
    )


def _reports_differently(before: Mapping[str, Observed], after: Mapping[str, Observed]) -> bool:
    if before is after:
        return False
    return before.keys() != after.keys() or not all(_is_same_state(before[key], after[key]) for key in after)


def _is_same_state(before: Observed, after: Observed) -> bool:
    return before is after or is_same(_decision_state(before), _decision_state(after))


def _decision_state(observed: Observed) -> tuple[object, ...]:
    drained = observed.phase is Phase.DRAINING and observed.in_flight == 0
    return observed.phase, observed.code, observed.restarts, observed.measured, drained, observed.sessions == 0


def status_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    """Events of the change that a status made: new failures, quarantine, clock skew."""
    replicas = [] if before.observed is after.observed else _phase_events(before, after) + _scale_events(before, after)
    return replicas + _quarantine_events(before, after) + skew_events(before, after)


def _phase_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    """An event for each new failure, by code; not for each attempt on a device that could not be read before it either:
    its node tells that once. The reconciler reports successes."""
    return [
        LogEvent(
            observed.code, observed.assignment, observed.reason, f"agent {after.name}", after.name, observed.workload
        )
        for observed in after.observed.values()
        if observed.phase is Phase.FAILED
        and observed.code is not None
        and ((known := before.observed.get(observed.assignment)) is None or not _is_same_state(known, observed))
        and not (
            observed.code in UNREADABLE_DEVICE and before.has_full_status and observed.device not in before.readings
        )
    ]


def _scale_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    """An event for each replica that was scaled to zero, and for each that is loaded again."""
    found = list[LogEvent]()
    for observed in after.observed.values():
        known = before.observed.get(observed.assignment)
        was_loaded = known is None or not known.is_unloaded
        if was_loaded and observed.is_unloaded and observed.code is Code.SCALED_TO_ZERO:
            code, message = str(Code.SCALED_TO_ZERO), observed.reason
        elif not was_loaded and observed.phase is Phase.READY and not observed.is_unloaded:
            code, message = SCALED_UP_EVENT, "it is loaded again"
        else:
            continue
        found.append(LogEvent(code, observed.assignment, message, f"agent {after.name}", after.name, observed.workload))
    return found


def _quarantine_events(before: NodeState, after: NodeState) -> list[LogEvent]:
    if before.quarantined == after.quarantined:
        return []
    code = Code.NODE_QUARANTINED if after.quarantined else "NODE_TRUSTED"
    return [LogEvent(code, after.name, str(after.refusal or "its reports are sound again"), node=after.name)]


def skew_events(before: NodeState | None, after: NodeState) -> list[LogEvent]:
    if not after.is_skewed or (before is not None and before.is_skewed):
        return []
    way = "behind" if after.skew_s > 0 else "ahead"
    message = f"its clock is {show_seconds(abs(after.skew_s))} {way} of the coordinator's; nothing is decided by it"
    return [LogEvent(Code.CLOCK_SKEW, after.name, message, node=after.name)]


def liveness_event(change: LivenessChange) -> LogEvent:
    return LogEvent(
        f"NODE_{change.after.upper().replace('-', '_')}",
        change.node,
        f"{change.before} -> {change.after}, silent for {change.silent_s:.1f}s",
        node=change.node,
    )
