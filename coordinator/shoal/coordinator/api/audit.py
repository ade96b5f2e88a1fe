"""Who did what: entries about acts that have happened already, so a full disk cannot undo them."""

from typing import Final

import structlog

from shoal.coordinator.controllers.events import EventLog
from shoal.coordinator.ports import Meter
from shoal.types.codes import ShoalError

log: Final = structlog.get_logger("shoal.coordinator.audit")


class AuditTrail:
    """Writes to the audit log; what the store does not take goes to the process's log, and is counted."""

    def __init__(self, events: EventLog, meter: Meter) -> None:
        self._events = events
        self._meter = meter

    async def note(self, actor: str, action: str, subject: str, outcome: str) -> None:
        try:
            await self._events.audit(actor, action, subject, outcome)
        except ShoalError as error:
            self._meter.count("audit_dropped", code=error.code)
            log.critical(
                "audit entry dropped", actor=actor, action=action, subject=subject, outcome=outcome, code=error.code
            )
