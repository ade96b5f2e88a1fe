"""The dashboard as the coordinator sees it: who may read, what is read, and the links that open it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from shoal.coordinator.api import views
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.dashboard.board import Board, Federated
from shoal.coordinator.api.dashboard.queries import Query, ReadMethods
from shoal.coordinator.api.dashboard.rows import Row, plain
from shoal.coordinator.api.dashboard.server import DashboardServer
from shoal.coordinator.api.dashboard.sessions import LINK_S, Logins, no_login
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import IdSource
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds
from shoal.wire.certificates import identity_of_der
from shoal.wire.handshake import PemFiles

log: Final = structlog.get_logger("shoal.coordinator.dashboard")

METHOD: Final = "Dashboard"
"""What refusals are counted and audited as."""


@dataclass(frozen=True, slots=True)
class DashboardLink:
    """A one-time link, as its parts."""

    # host:port of the dashboard.
    address: str
    # What opens a session there, once.
    secret: str
    # Seconds within which it has to be used.
    valid_s: Seconds


class Dashboard:
    """server.Access, and the tasks behind it."""

    def __init__(
        self,
        region: RegionalCoordinator,
        guard: Authorisation,
        audit: AuditTrail,
        ids: IdSource,
        files: PemFiles,
        *,
        advertise: str,
        hosts: tuple[str, ...],
        federation: Federated | None,
    ) -> None:
        self._region = region
        self._guard = guard
        self._audit = audit
        self._ids = ids
        self._advertise = advertise
        self._logins = Logins()
        self._methods: ReadMethods | None = None
        self.address = ""
        """host:port that browsers open; empty while there is none."""
        self._unavailable = "it is off"
        self._hosts = frozenset(host.lower() for host in hosts)
        self._server = DashboardServer(self, files)
        self.board = Board(region, federation, self._server.publish, self._describe)

    @property
    def region(self) -> str:
        return self._region.config.name

    @property
    def hosts(self) -> frozenset[str]:
        return self._hosts

    async def start(self, address: HostPort, methods: ReadMethods) -> None:
        """A port that cannot be had is no reason not to serve the region: `open_link` says why."""
        self._methods = methods
        try:
            port = await self._server.start(address.host, address.port)
            self.address = str(HostPort(self._advertise, port))
        except OSError as error:
            self._unavailable = f"{address}: {error.strerror or error}"
            log.error("dashboard_start_failed", address=str(address), error=str(error))

    async def run(self) -> None:
        """Until cancelled, or until following the region or its events fails; then both end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.board.run())
            tasks.create_task(self.board.run_events())

    async def stop(self) -> None:
        await self._server.stop()

    async def open_link(self, identity: Identity) -> DashboardLink:
        """Raises ShoalError(NOT_FOUND)."""
        if not self.address:
            raise refuse(
                Code.NOT_FOUND,
                f"no dashboard at this coordinator ({self._unavailable})",
                "a port for it",
                "start it with --dashboard HOST:PORT",
            )
        secret = self._ids.secret()
        self._logins.add_link(secret, identity, self._region.clock.now())
        await self._audit.note(identity.uri, "OpenDashboard", identity.name, "link made")
        return DashboardLink(self.address, secret, LINK_S)

    async def caller(self, certificate: bytes | None, session: str, method: str) -> Identity:
        if certificate is not None:
            identity = identity_of_der(certificate)
        elif session:
            identity = self._logins.identity_of(session, self._region.clock.now())
        else:
            raise no_login()
        self._guard.check_caller(method, identity)
        return identity

    async def log_in(self, link: str, address: str) -> str:
        session = self._ids.secret()
        identity = self._logins.redeem(link, session, self._region.clock.now())
        await self._audit.note(identity.uri, "DashboardLogin", address, "session opened")
        return session

    async def log_out(self, session: str) -> None:
        self._logins.end(session)

    async def ask(self, query: Query, given: Mapping[str, str], body: str, caller: Identity) -> Any:
        assert self._methods is not None, "it serves once it has started"
        return await run_to_completion(query.call(self._methods, given, body, caller))

    async def on_refusal(self, actor: str, refusal: Refusal) -> None:
        await self._guard.report_refusal(actor, METHOD, refusal)

    def set_readers(self, count: int) -> None:
        self.board.set_readers(count)

    async def wait_current(self) -> None:
        await self.board.wait_current()

    def _describe(self) -> Row:
        region = self._region
        signals = views.signal_views(region.signals.current(), region.signals.refusals, region.clock.wall())
        membership = self.board.membership
        joined = membership.current if membership is not None else None
        return {
            "name": region.config.name,
            "version": views.VERSION,
            "term": region.fence.term,
            "federation": joined.federation if joined is not None else "",
            "writable": region.write_refusal is None,
            "refusal": str(region.write_refusal or ""),
            "signals": [plain(each) for each in signals],
        }
