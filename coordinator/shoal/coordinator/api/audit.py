"""The audit trail: entries are written after the act, so a full disk cannot undo it."""

from typing import Final

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.ports import Meter
from shoal.types.codes import ShoalError

log: Final = structlog.get_logger("shoal.coordinator.audit")


class AuditTrail:
    """Writes to the audit log. Entries that the store refuses go to the process's log, and are counted."""

    def __init__(self, events: EventLog, meter: Meter) -> None:
        self._events = events
        self._meter = meter

    async def note(self, actor: str, action: str, subject: str, outcome: str) -> None:
        try:
            await self._events.audit(actor, action, subject, outcome)
        except ShoalError as error:
            self._meter.count(metrics.AUDIT_DROPPED, code=error.code)
            log.error(
                "audit_entry_dropped", actor=actor, action=action, subject=subject, outcome=outcome, code=error.code
            )
