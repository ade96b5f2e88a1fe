"""Timing of the supervisor."""

from dataclasses import dataclass, field

from shoal.agent.core.assignment import states


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Timing of the supervisor."""

    # Time limits of one assignment's phases.
    limits: states.AssignmentLimits = field(default_factory=states.AssignmentLimits)
    # Seconds between statuses, until a coordinator sets its own value.
    heartbeat_s: float = 1.0
    # Every n-th status is a full one, so what a lost status contained is repeated within n heartbeats.
    full_every: int = 8
    # Seconds before the next attempt after a fatal refusal. Retrying at all lets an operator fix the cause meanwhile.
    fatal_retry_s: float = 30.0
    # Seconds between polls of a draining replica and of a front that starts.
    poll_s: float = 0.1
    # Seconds between attempts to persist the desired set or to configure the front.
    retry_s: float = 0.5
    # Seconds between garbage collections of the model cache.
    collect_s: float = 60.0
    # Maximum seconds that a probe waits for replicas that start. At boot they then serve sooner, and a probe beside
    # them would not measure what the device can do.
    probe_wait_s: float = 30.0
