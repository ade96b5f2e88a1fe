"""An MQTT broker beside the coordinator, as far as its promises reach the sessions that it carries.

An agent reaches broker and coordinator by the same path. The model covers retained messages, QoS 1 (a publisher gets an
acknowledgement, and a message may arrive twice, the second time late), the last will, and crashes, which end every
connection at once and at times lose the retained messages. It knows topics and payloads, and nothing of what they mean:
both ends of a session are the cores of agent and coordinator (`broker_links`).
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.simulator.parts.network import COORDINATOR, KEEPALIVE_S, Pipe, SimNetwork
from shoal.types.mqtt_frames import Publication

BROKER: Final = "broker"
ACKNOWLEDGED_WITHIN_S: Final = 3.0
"""A client gives up a publication that the broker has not acknowledged after as long."""
REDELIVERY_S: Final = 2.0
"""Mean seconds until a duplicate arrives."""


class BrokerLost(Exception):
    """The broker did not answer, or the connection has ended."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """Filters of topics, where `+` stands for any one part. retained: deliver first what the broker keeps of them."""

    filters: tuple[str, ...]
    retained: bool


@dataclass(frozen=True, slots=True)
class ClientPacket:
    """What a client sends, with the number that its acknowledgement repeats. body: None: it disconnects."""

    number: int
    body: Publication | Subscription | None


class BrokerClient:
    """One connection to the broker. inbox: messages from the broker; None once the connection is over."""

    def __init__(self, broker: "SimBroker", place: str, will: Publication) -> None:
        network = broker.network
        self.place = place
        self.will = will
        self.filters: set[str] = set()
        self.inbox: asyncio.Queue[Publication | None] = asyncio.Queue()
        there, back = (place, COORDINATOR), (COORDINATOR, place)
        if place == COORDINATOR:
            there, back = (COORDINATOR, BROKER), (BROKER, COORDINATOR)
        self._paths = there, back
        self._broker = broker
        self._silent_count = 0
        self._is_known = True
        self._number = 0
        self._unacknowledged: dict[int, asyncio.Future[bool]] = {}
        self.up = Pipe[ClientPacket](network, *there, self._arrive)
        self.down = Pipe[Publication | int](network, *back, self._on_packet)
        network.world.call_later(KEEPALIVE_S, self._watch)

    @property
    def is_open(self) -> bool:
        return self.up.open

    async def subscribe(self, filters: Iterable[str], *, retained: bool) -> None:
        """Raises BrokerLost."""
        await self._send(Subscription(tuple(filters), retained))

    async def publish(self, publication: Publication) -> None:
        """Returns when the broker has acknowledged. Raises BrokerLost."""
        await self._send(publication)

    def disconnect(self) -> None:
        """Disconnect cleanly after everything published: the broker sends no will."""
        if self.up.open:
            self.up.send(ClientPacket(0, None))
            self._end()

    def reset(self) -> None:
        """The client's process died, or it gave up."""
        if self.up.open:
            self._end()
            path = self._broker.network.path(*self._paths[0])
            if not path.cut:
                self._broker.network.world.call_later(0.05 + self._broker.network.delay(path), self._on_lost)

    def on_broker_death(self) -> None:
        self._is_known = False
        if self.up.open:
            self.up.open = self.down.open = False
            path = self._broker.network.path(*self._paths[1])
            notice_s = 2 * KEEPALIVE_S if path.cut else 0.05 + self._broker.network.delay(path)
            self._broker.network.world.call_later(notice_s, self._end)

    def retransmit(self) -> None:
        self.up.retransmit()
        self.down.retransmit()

    async def _send(self, body: Publication | Subscription) -> None:
        if not self.up.open:
            raise BrokerLost
        self._number += 1
        acknowledged = self._unacknowledged[self._number] = self._broker.network.world.loop.create_future()
        self.up.send(ClientPacket(self._number, body))
        try:
            async with asyncio.timeout(ACKNOWLEDGED_WITHIN_S):
                arrived = await acknowledged
        except TimeoutError as cause:
            raise BrokerLost from cause
        if not arrived:
            raise BrokerLost

    def _on_packet(self, packet: Publication | int) -> None:
        """From the broker: a message, or the number of what it acknowledges."""
        if isinstance(packet, Publication):
            self.inbox.put_nowait(packet)
        else:
            self._settle(packet, arrived=True)

    def _settle(self, number: int, *, arrived: bool) -> None:
        acknowledged = self._unacknowledged.pop(number, None)
        if acknowledged is not None and not acknowledged.done():
            acknowledged.set_result(arrived)

    def _end(self) -> None:
        self.up.open = self.down.open = False
        for number in tuple(self._unacknowledged):
            self._settle(number, arrived=False)
        self.inbox.put_nowait(None)

    def _arrive(self, packet: ClientPacket) -> None:
        """At the broker."""
        if not self._is_known:
            return
        match packet.body:
            case None:
                self._forget()
            case Publication() as publication:
                self._broker.publish(publication)
                self._acknowledge(packet)
            case Subscription(filters, retained):
                self.filters.update(filters)
                self._acknowledge(packet)
                if retained:
                    self._broker.send_retained(self)

    def _acknowledge(self, packet: ClientPacket) -> None:
        if self.down.open:
            self.down.send(packet.number)

    def _watch(self) -> None:
        """Keepalive: both ends give up on a path that was cut at two consecutive checks."""
        if not self._is_known:
            return
        paths = [self._broker.network.path(*way) for way in self._paths]
        self._silent_count = self._silent_count + 1 if any(path.cut for path in paths) or not self.up.open else 0
        if self._silent_count >= 2:
            if self.up.open:
                self._end()
            self._on_lost()
            return
        self._broker.network.world.call_later(KEEPALIVE_S, self._watch)

    def _on_lost(self) -> None:
        """The broker notices the loss and publishes the will."""
        if self._is_known:
            self._forget()
            self._broker.publish(self.will)

    def _forget(self) -> None:
        self._is_known = False
        self._broker.clients.remove(self)


class SimBroker:
    """One broker process, which may die at any time and lose its retained messages."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.rng = network.world.rng.stream("broker")
        self.is_up = True
        self.clients: list[BrokerClient] = []
        self._retained: dict[str, Publication] = {}
        network.heal_listeners.append(self._on_healed)

    def attach(self, place: str, will: Publication) -> BrokerClient | None:
        """Open a clean session. None: nothing listens."""
        if not self.is_up:
            return None
        client = BrokerClient(self, place, will)
        self.clients.append(client)
        return client

    def publish(self, publication: Publication) -> None:
        """Deliver one published message, at times twice."""
        self._distribute(publication)
        if self.rng.happens(self.network.path(BROKER, COORDINATOR).duplicate):
            self.network.world.call_later(self.rng.exponential(REDELIVERY_S), lambda: self._distribute(publication))

    def send_retained(self, client: BrokerClient) -> None:
        for publication in self._retained.values():
            self._send(client, publication)

    def die(self, *, forgets: bool) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self.network.world.record("fault.broker", forgets=forgets, clients=len(self.clients))
        clients, self.clients = self.clients, []
        for client in clients:
            client.on_broker_death()
        if forgets:
            self._retained.clear()

    def start(self) -> None:
        self.is_up = True

    def _distribute(self, publication: Publication) -> None:
        if not self.is_up:
            return
        if publication.retain:
            self._retained[publication.topic] = publication
        for client in self.clients:
            self._send(client, publication)

    def _send(self, client: BrokerClient, publication: Publication) -> None:
        if client.down.open and any(is_match(each, publication.topic) for each in client.filters):
            client.down.send(publication)

    def _on_healed(self) -> None:
        for client in self.clients:
            client.retransmit()


def is_match(pattern: str, topic: str) -> bool:
    """Whether a filter, in which `+` stands for any one part, takes in a topic."""
    parts, levels = pattern.split("/"), topic.split("/")
    return len(parts) == len(levels) and all(part in ("+", level) for part, level in zip(parts, levels, strict=True))
