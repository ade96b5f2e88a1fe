"""Settings of the data plane."""

from dataclasses import dataclass, field

from shoal.agent.core.routing import AdmissionLimits


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of the data plane."""

    # Region of this agent.
    region: str
    # Name under which requests that enter here are counted: the node's.
    origin: str
    # Deadline of a request whose caller sets none, seconds.
    timeout_s: float = 60.0
    # Longest deadline that a caller may set, seconds.
    max_timeout_s: float = 300.0
    # What may wait at this front.
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
