"""Times and bounds of a trade."""

from typing import Final

from shoal.types.units import Seconds

ANSWER_S: Final = Seconds(1.0)
"""Time that bidders get for an answer."""
ANSWER_GRACE_S: Final = Seconds(3.0)
"""Time after `ANSWER_S` from which on a round without a result counts as unanswered."""
CALL_S: Final = Seconds(2.0)
"""A call to another region is repeated if there was no result for this long."""
RETRY_S: Final = Seconds(0.25)
"""The same, for a call that is known to have failed."""
HOLD_MOST_S: Final = Seconds(60.0)
LEASE_MOST_S: Final = Seconds(60.0)
"""Longer holds and leases count as this long; the delegate grants no longer ones."""
ALLOWANCE_S: Final = Seconds(5.0)
"""The delegate's, after the end of its lease."""
AWARD_EXPIRY_S: Final = Seconds(HOLD_MOST_S + LEASE_MOST_S + 2 * ALLOWANCE_S)
"""An award that was last sent this long ago, and never renewed, holds nothing."""
RENEW_S: Final = Seconds(1.5)
"""Time between renewals, or a third of the lease if shorter: renewals also detect that a region is lost."""
SILENT_S: Final = Seconds(4.0)
"""A delegate that answered no renewal for this long is not relied on: the local region prepares to serve, if it can."""
LOST_S: Final = Seconds(3.0)
"""A delegate that was silent for this long, and whose gateways fail too, is lost. Silence alone may be that of its
coordinator only, while its replicas serve on."""
SEQUENCE_STEP: Final = 1000
"""After a restart, renewals are numbered from the next multiple of this, so that a number can be used without
storing it."""
CONFIRM_S: Final = Seconds(2.0)
"""After a restart, an agreement's routes stay for this long; its delegate must have answered by then."""
NOTICE_S: Final = Seconds(60.0)
ROUTE_PROPAGATION_S: Final = Seconds(2.0)
"""Time between leaving the routes and the end of an agreement: routes take this long to reach every gateway."""
POLL_LEAST_S: Final = Seconds(0.1)
"""First interval between renewals while the delegate starts; it grows with the delegate's age."""
START_S: Final = Seconds(60.0)
"""A delegate that does not serve after this plus three times the load time of its bid is in breach."""
SHORT_S: Final = Seconds(30.0)
"""So is one that serves less than agreed for this long."""
LOCAL_STABLE_S: Final = Seconds(60.0)
"""A workload that was delegated for lack of a local place comes back when there has been one for this long."""
SWITCH_GAIN_LEAST: Final = 0.10
"""At the end of its term, an agreement yields to another region's offer that is better by this share, or by the
margin if greater."""
COOLDOWN_S: Final = Seconds(60.0)
"""Time between two attempts to improve a running workload; jitter adds up to a quarter."""
BACKOFF_LEAST_S: Final = Seconds(1.0)
BACKOFF_MOST_S: Final = Seconds(60.0)
"""After a round in which no offer fits, the pause doubles from BACKOFF_LEAST_S up to this."""
BACKOFF_SPREAD: Final = 0.25
"""Jitter of that pause: it is up to this share shorter or longer."""
