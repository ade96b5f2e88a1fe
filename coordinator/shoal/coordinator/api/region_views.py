"""What the operator API shows of a region: lists of its resources, and single ones."""

from functools import partial
from typing import Any, Final

from shoal.coordinator.api import views
from shoal.coordinator.api.diagnostics import AddressableProcess
from shoal.coordinator.api.events import newest_events
from shoal.coordinator.api.migrations import migration_view, migration_views, queued_move_view
from shoal.coordinator.api.pace import Pace, extend_in_slices
from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2
from shoal.wire.nouns import to_wire

LISTS: Final = {"policies": "Policy", "tenants": "Tenant"}
_KINDS_LISTED: Final = (
    "nodes",
    "devices",
    "workloads",
    "placements",
    "tokens",
    "events",
    "regions",
    "agreements",
    "migrations",
    "ledger",
    *LISTS,
)
MAX_LEDGER_ENTRIES: Final = 2_000
"""Most ledger entries in one reply, the newest: an entry carries what its counterpart signed, and a reply holds 4
MiB."""


class RegionViews:
    """Builds views of the region as it is now."""

    def __init__(self, region: RegionalCoordinator, enrolment: Enrolment, process: AddressableProcess) -> None:
        self._region = region
        self._enrolment = enrolment
        self._process = process
        self._clock = region.clock

    async def find(self, kind: str, name: str, tenant: str, compute: Compute = inline) -> operator_pb2.GetReply:
        """All of a kind with this name and tenant; an empty string stands for any. compute: where long computations
        run. Raises ShoalError(KIND_UNKNOWN | NODE_UNKNOWN | NOT_FOUND)."""
        found = await self._list(kind, name, tenant, compute)
        if name or tenant:
            _filter(found, name, tenant)
            if name and not found.ListFields():
                code = Code.NODE_UNKNOWN if kind == "nodes" else Code.NOT_FOUND
                raise refuse(
                    code, f"none of the {kind} is {name!r:.120}", "one that is listed", f"see `shoal get {kind}`"
                )
        return found

    async def node(self, name: str) -> operator_pb2.NodeView:
        state = self._region.fleet.fleet.nodes[name]
        ends = await self._enrolment.expiry_of(state.node.role, name)
        return views.node_view(state, self._region.workloads.desired.get(name), ends)

    def migration(self, migration: Migration | QueuedMove) -> operator_pb2.MigrationView:
        region, now, wall = self._region, self._clock.now(), self._clock.wall()
        if isinstance(migration, QueuedMove):
            return queued_move_view(region.workloads, region.fleet.fleet, migration, now, wall)
        return migration_view(region.workloads, region.fleet.fleet, migration, now, wall)

    def signals(self) -> list[operator_pb2.SignalView]:
        signals = self._region.signals
        return views.signal_views(signals.current(), signals.refusals, self._clock.wall())

    async def _list(self, kind: str, name: str, tenant: str, compute: Compute) -> operator_pb2.GetReply:
        """The candidates for this name and tenant: all of a kind, or fewer where building them is expensive."""
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        reply = operator_pb2.GetReply()
        match kind:
            case "nodes":
                pace = Pace()
                for each, state in sorted(fleet.nodes.items()):
                    ends = await self._enrolment.expiry_of(state.node.role, each)
                    reply.nodes.append(views.node_view(state, controller.desired.get(each), ends))
                    await pace.breathe()
            case "devices":
                costs = controller.costs
                devices = (
                    view
                    for each, state in sorted(fleet.nodes.items())
                    for view in views.device_views(state, controller.desired.get(each), costs)
                )
                await extend_in_slices(reply.devices, devices)
            case "workloads":
                await extend_in_slices(reply.workloads, views.workload_views(controller, fleet))
            case "placements":
                plan = await self._region.placement.explain(compute=compute)
                desired, fleet = dict(controller.desired), self._region.fleet.fleet
                reply.placements.extend(await compute(lambda: views.placement_views(desired, fleet, plan)))
            case "tokens":
                reply.tokens.extend(views.token_view(token) for token in await self._enrolment.tokens())
            case "agreements":
                trades = self._region.origin.trades if self._region.origin is not None else {}
                agreements = self._region.delegate.states.values() if self._region.delegate is not None else ()
                seen = partial(service_report, fleet)
                reply.agreements.extend(views.agreement_views(trades, agreements, self._clock.now(), seen))
            case "migrations":
                now, wall = self._clock.now(), self._clock.wall()
                reply.migrations.extend(migration_views(controller, fleet, name, tenant, now, wall))
            case "ledger":
                entries = await self._region.ledger.newest_iterator(MAX_LEDGER_ENTRIES)
                await extend_in_slices(reply.ledger, (to_wire(entry) for entry in entries))
            case "events":
                await extend_in_slices(reply.events, await newest_events(self._region.events))
            case "regions":
                name = self._region.config.name
                view = reply.regions.add(name=name, signals=self.signals())
                view.leader, view.coordinators[:] = (
                    self._process.link_address,
                    self._process.link_addresses.split(","),
                )
                if (stored := controller.catalog.documents.get(DocumentKey("Region", name))) is not None:
                    view.document.CopyFrom(views.document_view(stored))
            case "tenants":
                documents, desired = controller.catalog.documents, controller.desired
                reply.documents.extend(
                    views.tenant_view(stored, controller.catalog.quotas[key.name], desired, fleet, controller.last_plan)
                    for key, stored in sorted(documents.items())
                    if key.kind == LISTS[kind]
                )
            case kind if kind in LISTS:
                reply.documents.extend(
                    views.document_view(stored)
                    for key, stored in sorted(controller.catalog.documents.items())
                    if key.kind == LISTS[kind]
                )
            case _:
                raise unknown_kind(kind, _KINDS_LISTED)
        return reply


def _filter(reply: operator_pb2.GetReply, name: str, tenant: str) -> None:
    """Keeps the items with this name and tenant, in whichever list is filled."""
    for field, values in reply.ListFields():
        kept = [value for value in values if _matches(field.name, value, name, tenant)]
        listed = getattr(reply, field.name)
        del listed[:]
        listed.extend(kept)


def _matches(field: str, value: Any, name: str, tenant: str) -> bool:
    match field:
        case "nodes":
            return value.node.name == name or not name
        case "devices":
            return name in ("", value.node, f"{value.node}/{value.device.name}")
        case "workloads":
            return name in ("", value.workload.name) and tenant in ("", value.workload.tenant)
        case "placements":
            workload = value.assignment.workload
            return name in ("", workload.name, value.assignment.id) and tenant in ("", workload.tenant)
        case "documents" | "regions":
            return name in ("", value.name)
        case "tokens":
            return name in ("", value.id, value.name)
        case "agreements":
            return name in ("", value.agreement, value.workload.name) and tenant in ("", value.workload.tenant)
        case "migrations":
            return True  # filtered before they were built
        case "ledger":
            return name in ("", value.agreement)
        case "events":
            return name in ("", value.subject, value.node, value.workload.name) and tenant in (
                "",
                value.workload.tenant,
            )
    return False


def unknown_kind(kind: str, known: tuple[str, ...]) -> ShoalError:
    return refuse(Code.KIND_UNKNOWN, f"kind {kind!r:.40}", f"one of {', '.join(known)}", "choose one of these")
