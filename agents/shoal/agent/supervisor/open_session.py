"""The session with a coordinator that is open now."""

import asyncio
from dataclasses import dataclass, field

from shoal.agent.core import link_session
from shoal.agent.ports import LinkSession
from shoal.types.link import Welcome
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Elapsed, Seconds

MAX_TRACKED_STATUSES = 32
"""Statuses whose send time is kept. A lease that answers an older status extends nothing."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """The open session with a coordinator."""

    # The transport of the session.
    session: LinkSession
    # The coordinator's reply to the hello.
    welcome: Welcome
    # Seconds between statuses: the coordinator's last value, from its welcome or from a desired set.
    heartbeat_s: Seconds
    # What this session has reported, so that the next status holds only changes.
    reporter: link_session.ReportCursor = field(default_factory=link_session.ReportCursor)
    # Receipts sent in this session.
    receipts: tuple[SignedReceipt, ...] = ()
    # Set once a status was sent, or once sending failed (`report_failed`).
    has_reported: asyncio.Event = field(default_factory=asyncio.Event)
    # True if sending failed before any status was sent: the coordinator saw nothing of this node.
    report_failed: bool = False
    # Send time of the newest statuses, by sequence number; at most MAX_TRACKED_STATUSES.
    sent_at: dict[int, Elapsed] = field(default_factory=dict)
