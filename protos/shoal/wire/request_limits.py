"""How many fields a request may hold, for every method of the control plane: agent link, operator API, artifacts,
enrolment, joining, federation, peers. A front has the limits of its own methods.

A method that has a repeated field and no limits here accepts nothing. A test compares the list with the services'
descriptors.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from shoal.types.assignment import MAX_SUBSCRIPTIONS
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import link_pb2, mqtt_pb2
from shoal.wire.field_limits import CountLimits, check_counts

M = TypeVar("M", bound=Message)

MAX_TEXTS: Final = 1024
"""Files of one plan."""
MAX_SOURCES: Final = 4096
"""Model sources of one plan."""
MAX_RECEIPTS: Final = 128
"""Receipts in one message, one per device."""

SMALL: Final = CountLimits(fields=256, repeated=64)
"""For requests without repeated fields."""
PLAN: Final = CountLimits(
    fields=16_384,
    repeated=64,
    by_field={
        f"shoal.v1.{kind}.{name}": most
        for kind in ("PlanRequest", "ApplyRequest")
        for name, most in (("documents", MAX_TEXTS), ("digests", MAX_SOURCES))
    },
)
SESSION_ITEMS: Final[Mapping[str, int]] = {
    "shoal.v1.NodeEvents.events": 256,
    "shoal.v1.LogLines.lines": 1_000,
    "shoal.v1.SpansFound.spans": 4_096,
    "shoal.v1.Receipts.receipts": MAX_RECEIPTS,
    "shoal.v1.Node.devices": 1_024,
    "shoal.v1.Status.observed": 1_600,
    "shoal.v1.Status.gone": 4_096,
    "shoal.v1.Status.readings": 1_024,
    "shoal.v1.Status.silent": 1_024,
    "shoal.v1.Status.ingress": 5_900,
    "shoal.v1.Status.agreement_counts": 4_096,
    "shoal.v1.Status.tenants": 4_096,
    "shoal.v1.Subscriptions.workloads": MAX_SUBSCRIPTIONS,
}
"""Limits of lists in an agent's messages: the most that is sent, with a margin. As many of each as pass `SESSION` with
all their fields, where a message holds nothing else."""
SESSION: Final = CountLimits(
    fields=65_536,  # 13 ms of the coordinator's loop, of which a session may send fifty messages a second
    repeated=8_192,
    by_field={
        **SESSION_ITEMS,
        "shoal.v1.Observed.latencies": 65_536,
        "shoal.v1.AgreementCounts.latencies": 65_536,
        "shoal.v1.TensorSpec.shape": 65_536,
    },
)
"""For one message of an agent: a full status of hundreds of replicas, each with its signature and its latencies."""
RECEIPT: Final = CountLimits(fields=2_048, repeated=512, by_field={"shoal.v1.Kernel.versions": 4_096})
"""For a capability receipt, which is signed separately inside a message. ONNX Runtime 1.31 computes 217 ONNX operators
on CPUs, with 1,076 version bounds."""
LABELS: Final = CountLimits(fields=512, repeated=64)
"""For a token or a node: as many labels as a node may have."""
PUSH: Final = CountLimits(fields=2_048, repeated=1_024)
"""For a chunk of a push, whose head may name shapes: 64, each of 16 lengths."""
ENVELOPE_CONTENT: Final = CountLimits(fields=65_536, repeated=16_384)
"""For a signed message from one region to another: a solicitation with the profiles of its models."""

_OF_METHODS: Final[Mapping[str, CountLimits]] = {
    "/shoal.v1.AgentLink/Session": SESSION,
    "/shoal.v1.Operator/Plan": PLAN,
    "/shoal.v1.Operator/Apply": PLAN,
    "/shoal.v1.Operator/CreateToken": LABELS,
    "/shoal.v1.Operator/Label": LABELS,
    "/shoal.v1.Artifacts/Push": PUSH,
    "/shoal.v1.Artifacts/Inspect": PUSH,
    "/shoal.v1.Artifacts/Record": PUSH,
    "/shoal.v1.Joining/Join": SMALL,
}
_OF_MESSAGES: Final[Mapping[type[Message], CountLimits]] = {
    link_pb2.FromAgent: SESSION,
    mqtt_pb2.Opening: SESSION,
    mqtt_pb2.Signed: SMALL,
    mqtt_pb2.Sealed: SMALL,
    mqtt_pb2.Presence: SMALL,
    mqtt_pb2.RegionPresence: SMALL,
}
_NOTHING: Final = CountLimits(fields=0, repeated=0)


def limits_of(method: str) -> CountLimits:
    """Limits of a method, `/package.Service/Method`. A method that is not listed and has a repeated field accepts
    nothing."""
    listed = _OF_METHODS.get(method)
    if listed is not None:
        return listed
    return _NOTHING if _repeats(request_of(method), frozenset()) else SMALL


def request_of(method: str) -> Descriptor:
    """Descriptor of the method's request. Raises KeyError for an unknown method."""
    service, _, name = method.lstrip("/").rpartition("/")
    return descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type


def make_reader(method: str, parse: Callable[[bytes], M]) -> Callable[[bytes], M]:
    """`parse` preceded by a count of the fields, because protobuf would make an object of every two bytes."""
    descriptor, limits = request_of(method), limits_of(method)

    def read(data: bytes) -> M:
        """Raises ShoalError(FIELD_TOO_MANY | MESSAGE_INVALID)."""
        if (refusal := check_counts(descriptor, data, limits)) is not None:
            raise ShoalError(refusal)
        try:
            return parse(data)
        except DecodeError as cause:
            raise refuse(
                Code.MESSAGE_INVALID, "bytes that are no such message", "see the protocol", "update whoever sent it"
            ) from cause

    return read


def limits_of_message(kind: type[Message]) -> CountLimits | None:
    """Limits of a message that arrives by MQTT; None for messages of a coordinator, which its agents trust."""
    return _OF_MESSAGES.get(kind)


def _repeats(descriptor: Descriptor, seen: frozenset[str]) -> bool:
    return any(
        each.is_repeated
        or (
            each.message_type is not None
            and each.message_type.full_name not in seen
            and _repeats(each.message_type, seen | {descriptor.full_name})
        )
        for each in descriptor.fields
    )
