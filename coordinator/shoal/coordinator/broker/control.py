"""Manages the broker's access rights: ports.Broker over the control topic of Mosquitto's dynamic-security plugin.

The broker's own state is never trusted: each new connection reads everything it holds and reconciles it to what the
coordinator wants. A broker that starts empty, or missed a revocation, is therefore soon correct again.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from typing import Final, NamedTuple

import aiomqtt
import structlog

from shoal.coordinator import metrics
from shoal.coordinator.broker import rights
from shoal.coordinator.broker.rights import Json
from shoal.coordinator.ports import Clock, IdSource, Meter
from shoal.types import topics
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.wire import mqtt
from shoal.wire.handshake import PemFiles

BATCH: Final = 25
"""Nodes in one message. The plugin writes its whole file at every command and serves nobody meanwhile."""
PAGE: Final = 200
ANSWER_S: Final = 30.0
MOST_ANSWER_BYTES: Final = 2**20
"""Of one answer: a page of roles has 0.3 MiB. A broker need not be the owner's, and the region's loop reads its
answers."""
MOST_LISTED_BYTES: Final = 2**26
"""Of all pages of a list: what 45,000 nodes have."""
MOST_OTHERS: Final = 100
"""Messages that answer nothing, for each that does."""
RETRY_S: Final = Seconds(0.5)
_NOT_FOUND: Final = ("Client not found", "Role not found")
"""Errors of deleting what does not exist, which count as success."""

log: Final = structlog.get_logger("shoal.coordinator.broker")


class BrokerControl:
    """files: the coordinator's, read again at each connection. address: the broker's host:port. on_sync: called with
    region and nodes, on a thread, when the broker has them all."""

    def __init__(
        self,
        region: str,
        address: str,
        files: PemFiles,
        clock: Clock,
        ids: IdSource,
        meter: Meter,
        *,
        on_sync: Callable[[str, Set[str]], None] | None = None,
    ) -> None:
        self._region = region
        self._address = address
        self._files = files
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._on_sync = on_sync
        self._admitted: set[str] = set()
        self._expelled: set[str] = set()
        self._changed = asyncio.Event()
        self._in_sync = False
        self._last_error = ""
        """The last failure that was logged, so that each is logged once; empty while in sync."""

    @property
    def is_in_sync(self) -> bool:
        """True if the broker is connected and has every change requested so far."""
        return self._in_sync and not self._changed.is_set()

    async def admit(self, node: str) -> None:
        self._admitted.add(node)
        self._changed.set()

    async def expel(self, node: str) -> None:
        self._admitted.discard(node)
        self._expelled.add(node)  # even if it is admitted again at once: its connection must end
        self._changed.set()

    async def certificate(self) -> bytes | None:
        broker = HostPort.parse(self._address)
        try:
            async with asyncio.timeout(mqtt.CALL_S):
                context = await asyncio.to_thread(mqtt.tls_context, self._files)
                _, writer = await asyncio.open_connection(broker.host, broker.port, ssl=context)
        except (OSError, TimeoutError):
            return None
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(shown).encode()

    async def run(self) -> None:
        """Runs until cancelled; waits for a broker that is away."""
        while True:
            try:
                await self._session()
            except (aiomqtt.MqttError, OSError, ShoalError) as error:
                if str(error) != self._last_error:
                    log.warning("broker_lost", address=self._address, error=str(error))
                self._last_error = str(error)
            except Exception:
                log.exception("broker_reply_invalid", address=self._address)
            self._in_sync = False
            self._meter.count(metrics.BROKER_CONNECTIONS_LOST)
            await self._clock.sleep(RETRY_S)

    async def _session(self) -> None:
        """One connection, to its end. Raises what ended it."""
        client = await mqtt.open_client(self._files, self._address, self._ids.name("coordinator-control"))
        try:
            talk = _ControlClient(client)
            await mqtt.subscribe(client, [rights.RESPONSE])
            parts = {asyncio.create_task(talk.read()), asyncio.create_task(self._sync_forever(talk))}
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
        finally:
            await mqtt.close_client(client)

    async def _sync_forever(self, control: "_ControlClient") -> None:
        held = await self._read_nodes(control)
        log.info("broker_rights_loaded", address=self._address, nodes=len(held))
        while True:
            self._changed.clear()
            self._in_sync = False
            wanted = frozenset(self._admitted)
            expelled, self._expelled = self._expelled, set()
            keep = {node for node, sound in held.items() if sound} & wanted - expelled
            try:
                await _apply_changes(control, self._region, held.keys() - keep, wanted - keep)
            except BaseException:
                self._expelled |= expelled
                raise
            held = dict.fromkeys(wanted, True)
            self._in_sync, self._last_error = not self._changed.is_set(), ""
            if self._on_sync is not None and self._in_sync:
                await asyncio.to_thread(self._on_sync, self._region, wanted)
            await self._changed.wait()

    async def _read_nodes(self, control: "_ControlClient") -> dict[str, bool]:
        """Every node that the broker has rights for, and whether they are exactly the rights of a node.

        Only roles with our prefix are read, so an owner's other clients stay as they are.
        """
        own = rights.coordinator_acls(self._region)
        is_own_right = False
        # By node: whether its role, and its client, are what they should be.
        roles, clients = dict[str, bool](), dict[str, bool]()
        async for role in control.list("listRoles", "roles"):
            name = role["rolename"]
            if name == rights.COORDINATOR_ROLE:
                is_own_right = _acl_set(role["acls"]) == _acl_set(own)
            elif node := rights.node_of(name):
                roles[node] = _acl_set(role["acls"]) == _acl_set(rights.node_acls(self._region, node))
        async for client in control.list("listClients", "clients"):
            name, held = client["username"], [role["rolename"] for role in client["roles"]]
            if name and (name in roles or rights.role_of(name) in held):
                clients[name] = held == [rights.role_of(name)]
        if not is_own_right:  # another version made it; changing it disconnects us
            await control.ask([{"command": "modifyRole", "rolename": rights.COORDINATOR_ROLE, "acls": own}])
        return {node: roles.get(node, False) and clients.get(node, False) for node in roles.keys() | clients.keys()}


class _ControlClient:
    """Requests on one connection, one at a time, and the plugin's answers."""

    def __init__(self, client: aiomqtt.Client) -> None:
        self._client = client
        self._asked: _Asked | None = None
        self._sequence = 0
        # Bytes of the last answer.
        self._answer_bytes = 0

    async def read(self) -> None:
        """Reads until the connection ends; raises what ended it. What answers no question is not kept."""
        others = 0
        async for message in self._client.messages:
            asked, content = self._asked, mqtt.payload_of(message)
            if asked is None or asked.answers.done() or asked.mark not in content:
                others += 1
                if others > MOST_OTHERS:
                    raise _unruly(f"{others} messages that answer nothing")
                continue
            if len(content) > MOST_ANSWER_BYTES:
                raise _unruly(f"an answer of {len(content)} bytes")
            answers: list[Json] = json.loads(content).get("responses", [])
            if answers and answers[0].get("correlationData") == asked.mark.decode():
                others, self._answer_bytes = 0, len(content)
                asked.answers.set_result(answers)

    async def ask(self, commands: Sequence[Json]) -> list[Json]:
        """One answer for each command. Raises ShoalError(CONFLICT) if one failed, TimeoutError."""
        self._sequence += 1
        mark = f"shoal-{self._sequence}"
        content = json.dumps({"commands": [{**command, "correlationData": mark} for command in commands]}).encode()
        self._asked = _Asked(mark.encode(), asyncio.get_running_loop().create_future())
        async with asyncio.timeout(ANSWER_S):
            await mqtt.publish(self._client, rights.CONTROL, content)
            answers = await self._asked.answers
        for answer in answers:
            if answer.get("error", "") not in ("", *_NOT_FOUND):
                found = f"{answer['command']}: {answer['error']}"
                raise refuse(Code.CONFLICT, found, "a broker that does as it is told", "it is looked over again")
        return answers

    async def clear(self, topic: str) -> None:
        """Clears the topic's retained message."""
        await mqtt.publish(self._client, topic, b"", retain=True)

    async def list(self, command: str, field: str) -> AsyncIterator[Json]:
        """All items of one kind, page by page. Raises as `ask` does."""
        count = size = 0
        while True:
            (answer,) = await self.ask([{"command": command, "verbose": True, "count": PAGE, "offset": count}])
            page = answer["data"][field]
            count, size = count + len(page), size + self._answer_bytes
            if size > MOST_LISTED_BYTES:
                raise _unruly(f"more than {MOST_LISTED_BYTES >> 20} MiB of {field}")
            for item in page:
                yield item
            if len(page) < PAGE:
                return


class _Asked(NamedTuple):
    """The question that waits."""

    # Comes back in its answers.
    mark: bytes
    answers: asyncio.Future[list[Json]]


def _unruly(found: str) -> ShoalError:
    return refuse(Code.CONFLICT, f"the broker sends {found}", "answers to what it is asked", "look at the broker")


async def _apply_changes(control: _ControlClient, region: str, expelled: Set[str], admitted: Set[str]) -> None:
    for nodes in _batches(expelled):
        await control.ask([command for node in nodes for command in rights.expulsion(node)])
        for topic in (topics.of_node(region, node, channel) for node in nodes for channel in sorted(topics.RETAINED)):
            await control.clear(topic)
    for nodes in _batches(admitted):
        await control.ask([command for node in nodes for command in rights.admission(region, node)])
    if expelled or admitted:
        log.info("broker_rights_changed", admitted=len(admitted), expelled=len(expelled))


def _batches(nodes: Set[str]) -> Iterator[list[str]]:
    ordered = sorted(nodes)
    for start in range(0, len(ordered), BATCH):
        yield ordered[start : start + BATCH]


def _acl_set(acls: list[Json]) -> frozenset[tuple[str, str, bool]]:
    return frozenset((acl["acltype"], acl["topic"], acl["allow"]) for acl in acls)
