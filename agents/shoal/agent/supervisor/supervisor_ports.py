"""All that the supervisor needs of the world, as one value."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from shoal.agent.driver_port import DeviceDriver
from shoal.agent.ports import (
    AgentClock,
    AgentJournal,
    CoordinatorContact,
    CoordinatorLink,
    FrontControl,
    Log,
    Logs,
    ModelCache,
    ModelPreparer,
    NodeMembership,
    NodeTrust,
    PreparedModel,
    ReceiptSigner,
    RecordingSink,
    Spans,
    WorkerPool,
)
from shoal.types.assignment import Assignment, Trust
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.units import Wall


class _NoContact:
    """CoordinatorContact of a node that remembers no earlier run."""

    def last_contact(self) -> None:
        return None

    def on_link_up(self, coordinator_time: Wall) -> None:
        pass

    def on_link_lost(self) -> None:
        pass


class _NoMembership:
    """NodeMembership of a node whose certificate is not checked."""

    def current_trust(self) -> NodeTrust:
        return NodeTrust()

    async def adopt(self, trust: Trust) -> None:
        pass

    def on_link_refused(self, refusal: Refusal) -> None:
        pass


class _NoPreparer:
    """ModelPreparer of a node that loads models as they were pushed, and no other."""

    def is_needed(self, asked: Assignment) -> bool:
        return asked.preparation is not None

    async def prepare(self, asked: Assignment, model: str, samples: str, on_start: Callable[[], None]) -> PreparedModel:
        raise refuse(Code.PREPARE_UNAVAILABLE, "a node that prepares no models", asked.precision, "place it elsewhere")

    def reject(self, prepared: PreparedModel) -> None:
        pass


async def _no_wait() -> None:
    """All devices are known from the start."""


@dataclass(frozen=True, slots=True)
class SupervisorPorts:
    """The ports of one supervisor."""

    # The families of devices that this node may have.
    drivers: Sequence[DeviceDriver]
    # Opens sessions with a coordinator.
    link: CoordinatorLink
    # Runs models, each in a worker.
    workers: WorkerPool
    # Serves requests by the routes of the desired set.
    front: FrontControl
    # Keeps the desired set and the receipts.
    journal: AgentJournal
    # Keeps models by digest.
    cache: ModelCache
    # Takes the answers of a replica as the reference of its model.
    recordings: RecordingSink
    # Signs what a device was measured to do.
    signer: ReceiptSigner
    # Tells elapsed and wall time.
    clock: AgentClock
    # Returns a fresh secret on each call.
    nonce: Callable[[], str]
    # Writes the log of the supervisor.
    log: Log
    # Remembers the coordinator between runs. By default no earlier run is remembered.
    contact: CoordinatorContact = field(default_factory=_NoContact)
    # Keeps certificate and trusted CAs current. By default no certificate is checked.
    membership: NodeMembership = field(default_factory=_NoMembership)
    # Makes models in another precision. By default none is made.
    preparer: ModelPreparer = field(default_factory=_NoPreparer)
    # Returns once the drivers have found the devices that the first session names; those found later it tells of anew.
    # Raises ShoalError where the node must not start. By default all are known from the start.
    wait_devices: Callable[[], Awaitable[None]] = _no_wait
    # Reads the logs of this node; None if none are kept.
    logs: Logs | None = None
    # Reads the trace spans of the front; None if none are kept.
    spans: Spans | None = None
