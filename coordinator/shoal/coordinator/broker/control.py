"""Manages the broker's access rights: ports.Broker over the control topic of Mosquitto's dynamic-security plugin.

The broker's own state is never trusted: each new connection reads everything it holds and reconciles it to what the
coordinator wants. A broker that starts empty, or missed a revocation, is therefore soon correct again.
"""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

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
        roles = {role["rolename"]: _acl_set(role["acls"]) for role in await control.list("listRoles", "roles")}
        clients = {
            client["username"]: [role["rolename"] for role in client["roles"]]
            for client in await control.list("listClients", "clients")
        }
        own = rights.coordinator_acls(self._region)
        if roles.get(rights.COORDINATOR_ROLE) != _acl_set(own):  # another version made it; changing it disconnects us
            await control.ask([{"command": "modifyRole", "rolename": rights.COORDINATOR_ROLE, "acls": own}])
        nodes = {rights.node_of(role) for role in roles} | {
            name for name, held in clients.items() if rights.role_of(name) in held
        }
        return {
            node: clients.get(node) == [rights.role_of(node)]
            and roles.get(rights.role_of(node)) == _acl_set(rights.node_acls(self._region, node))
            for node in nodes
            if node
        }


class _ControlClient:
    """Requests on one connection, one at a time, and the plugin's answers."""

    def __init__(self, client: aiomqtt.Client) -> None:
        self._client = client
        self._answers: asyncio.Queue[Json] = asyncio.Queue()
        self._sequence = 0

    async def read(self) -> None:
        """Reads until the connection ends; raises what ended it."""
        async for message in self._client.messages:
            self._answers.put_nowait(json.loads(mqtt.payload_of(message)))

    async def ask(self, commands: Sequence[Json]) -> list[Json]:
        """One answer for each command. Raises ShoalError(CONFLICT) if one failed, TimeoutError."""
        self._sequence += 1
        mark = str(self._sequence)
        content = json.dumps({"commands": [{**command, "correlationData": mark} for command in commands]}).encode()
        async with asyncio.timeout(ANSWER_S):
            await mqtt.publish(self._client, rights.CONTROL, content)
            while True:
                answers: list[Json] = (await self._answers.get()).get("responses", [])
                if answers and answers[0].get("correlationData") == mark:
                    break
        for answer in answers:
            if answer.get("error", "") not in ("", *_NOT_FOUND):
                found = f"{answer['command']}: {answer['error']}"
                raise refuse(Code.CONFLICT, found, "a broker that does as it is told", "it is looked over again")
        return answers

    async def clear(self, topic: str) -> None:
        """Clears the topic's retained message."""
        await mqtt.publish(self._client, topic, b"", retain=True)

    async def list(self, command: str, field: str) -> list[Json]:
        """All items of one kind, page by page."""
        found: list[Json] = []
        while True:
            (answer,) = await self.ask([{"command": command, "verbose": True, "count": PAGE, "offset": len(found)}])
            page = answer["data"][field]
            found += page
            if len(page) < PAGE:
                return found


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
