"""A connection to the region's broker: mutual TLS, MQTT 5, no session state kept for a client that is gone.

The broker only relays. A message is trusted because of its envelope (`seal`), not because of where it came from.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.wire.handshake import PemFiles, raise_fault
from shoal.wire.limits import KEEPALIVE_TIMEOUT_S, LINK_BYTES
from shoal.wire.seal import ENVELOPE_BYTES

T = TypeVar("T")

KEEPALIVE_S: Final = int(KEEPALIVE_TIMEOUT_S)
"""A broker that is silent for this long counts as lost. It counts this client as lost after one and a half times as
long."""
EXPIRY_S: Final = 10
"""Seconds after which a message that is not retained has no value to a reader."""
PACKET_BYTES: Final = LINK_BYTES + ENVELOPE_BYTES + 4096
"""The largest packet accepted from the broker: a message with its envelope, topic and properties."""
RECEIVE_MOST: Final = 1000
"""Limit of incoming messages that are not acknowledged yet."""
CALL_S: Final = 3.0
CLOSE_S: Final = 1.0
_FAILED: Final = 0x80
"""Reason codes from here on are refusals."""


async def open_client(
    files: PemFiles,
    address: str,
    identifier: str,
    will: aiomqtt.Will | None = None,
    *,
    in_flight: int = 20,
    queue: type[asyncio.Queue[aiomqtt.Message]] | None = None,
) -> aiomqtt.Client:
    """A client connected to the broker at `address` (host:port); end it with `close_client`.

    in_flight: limit of messages that wait for the broker's acknowledgement. queue: class of the queue for incoming
    messages. Raises ShoalError(COORDINATOR_UNREACHABLE | CERT_UNTRUSTED | CERT_EXPIRED | CERT_NOT_YET_VALID |
    UNAUTHENTICATED).
    """
    broker = HostPort.parse(address)
    try:
        client = aiomqtt.Client(
            broker.host,
            broker.port,
            identifier=identifier,
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=True,
            will=will,
            keepalive=KEEPALIVE_S,
            timeout=CALL_S,
            properties=_connect_properties(),
            tls_context=await asyncio.to_thread(tls_context, files),
            max_inflight_messages=in_flight,
            queue_type=queue,
        )
        client.pending_calls_threshold = in_flight
        # Connecting runs in a thread, which a cancellation cannot stop, so close afterwards what it opened.
        opening = asyncio.ensure_future(client.__aenter__())
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: _abandon(client, done))
            raise
    except MqttConnectError as cause:
        raise refuse(
            Code.UNAUTHENTICATED,
            f"broker {address}: {cause}",
            "a client that it admits",
            "enrol again, or look at the broker's rights",
        ) from cause
    except (aiomqtt.MqttError, OSError, ValueError) as cause:
        for each in (cause, cause.__context__):
            if isinstance(each, ssl.SSLError):
                raise_fault(each, address)
        raise unreachable(address, cause) from cause
    client._disconnected.add_done_callback(
        _retrieve_exception
    )  # or else asyncio logs each loss whose exception nobody read
    return client


async def close_client(client: aiomqtt.Client) -> None:
    """Closes the connection. A broker that does not answer ends it by its keepalive."""
    client.timeout = CLOSE_S
    try:
        await client.__aexit__(None, None, None)
    except aiomqtt.MqttError:
        pass


async def subscribe(client: aiomqtt.Client, topics: Iterable[str], *, retained: bool = True) -> None:
    """QoS 1. retained: whether retained messages are delivered first. Raises ShoalError(TOPIC_DENIED),
    aiomqtt.MqttError."""
    names = tuple(topics)
    handling = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE if retained else SubscribeOptions.RETAIN_DO_NOT_SEND
    options = SubscribeOptions(qos=1, retainAsPublished=True, retainHandling=handling)
    granted: Sequence[int | ReasonCode] = await _cancellable(client.subscribe([(name, options) for name in names]))
    for name, reason in zip(names, granted, strict=True):
        if reason.is_failure if isinstance(reason, ReasonCode) else reason >= _FAILED:
            raise refuse(
                Code.TOPIC_DENIED, f"{name}: {reason}", "a broker that lets it be read", "look at the broker's rights"
            )


async def publish(client: aiomqtt.Client, topic: str, payload: bytes, *, retain: bool = False) -> None:
    """QoS 1; returns when the broker has acknowledged. Raises aiomqtt.MqttError."""
    properties = None if retain else publish_properties()
    await _cancellable(client.publish(topic, payload, qos=1, retain=retain, properties=properties))


async def _cancellable(call: Awaitable[T]) -> T:
    """The call's result, or the cancellation that came while it was awaited. In Python 3.11 `asyncio.wait_for`, which
    aiomqtt awaits, returns a result that comes at the same time, and forgets the cancellation."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    found = await call
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return found


def publish_properties() -> Properties:
    found = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    found.MessageExpiryInterval = EXPIRY_S
    return found


def payload_of(message: aiomqtt.Message) -> bytes:
    """The payload as bytes; empty where it is not bytes."""
    return bytes(message.payload) if isinstance(message.payload, bytes | bytearray) else b""


def unreachable(address: str, found: object) -> ShoalError:
    return refuse(
        Code.COORDINATOR_UNREACHABLE,
        f"broker {address}: {found}",
        "the region's broker",
        "check that it runs and that the address is right",
    )


def _retrieve_exception(disconnected: "asyncio.Future[None]") -> None:
    if not disconnected.cancelled():
        disconnected.exception()


_abandoned: Final[set[asyncio.Task[None]]] = set()


def _abandon(client: aiomqtt.Client, opened: "asyncio.Future[aiomqtt.Client]") -> None:
    if opened.cancelled() or opened.exception() is not None:
        return
    closing = asyncio.ensure_future(close_client(client))
    _abandoned.add(closing)
    closing.add_done_callback(_abandoned.discard)


def _connect_properties() -> Properties:
    found = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    found.SessionExpiryInterval = 0
    found.MaximumPacketSize = PACKET_BYTES
    found.ReceiveMaximum = RECEIVE_MOST
    return found


def tls_context(files: PemFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    return context
