"""The origin's side of a trade as values: what a workload's trade can be, what happens to it, what is to be done.

Nothing here has an optional part that another part decides: a state holds what is true in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from shoal.coordinator.core.negotiation.choice import Terms
from shoal.types.agreement import Award, GatewayRef, Grant, Notice, Release, Renewed, Service
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Offer
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Relaxation, WorkloadKey

LONG_AGO: Final = Elapsed(-math.inf)


class Need(StrEnum):
    """nothing: not to be delegated, or not there any more. content: has a place at home and may not move. better: has
    a place at home, may move to a better one. short: has none. moved: is on its way to one region, or there to stay.
    held: is on its way home, and stays there till then. home: is to leave the other region now."""

    NOTHING = "nothing"
    CONTENT = "content"
    BETTER = "better"
    SHORT = "short"
    MOVED = "moved"
    HELD = "held"
    HOME = "home"


@dataclass(frozen=True, slots=True)
class Deal:
    """What is known of one agreement. heard_at: when the newest renewal was asked for that was answered. lease_until:
    it may serve until then; over_at: it counts as breached from then on. since: of `service`. revoked: serials
    of the delegate's gateways that are refused. joules: of an inference, to two digits, as the delegate meters it;
    None: it has not said."""

    agreement: str
    offer: Offer
    gateways: tuple[GatewayRef, ...]
    lease_s: Seconds
    lease_until: Elapsed
    over_at: Elapsed
    sequence: int
    nonce: str
    asked_at: Elapsed
    heard_at: Elapsed
    renew_at: Elapsed
    service: Service
    since: Elapsed
    revoked: tuple[str, ...] = ()
    joules: float | None = None

    @property
    def region(self) -> str:
        return self.offer.region

    @property
    def serves(self) -> bool:
        """It was in service and nothing says that it stopped; `short` and `stopping` serve on."""
        return self.service is not Service.STARTING


@dataclass(frozen=True, slots=True)
class Resting:
    """No trade is under way. until: nothing is solicited before. refusal: what came of the last trade."""

    until: Elapsed
    refusal: Refusal | None = None
    kind: Literal["resting"] = "resting"


@dataclass(frozen=True, slots=True)
class Soliciting:
    """asked: hash of the documents that it was asked under. relaxed: in round 2, the change that was made for it.
    need: why. to: the one region that is asked; empty: all that the policy names."""

    solicitation: str
    round: int
    asked: str
    relaxed: str
    need: Need
    asked_at: Elapsed
    until: Elapsed
    to: str = ""
    kind: Literal["soliciting"] = "soliciting"


@dataclass(frozen=True, slots=True)
class Awarding:
    """until: the hold's end. award: sent again at `retry_at`, always the same."""

    offer: Offer
    award: Award
    asked: str
    until: Elapsed
    retry_at: Elapsed
    kind: Literal["awarding"] = "awarding"


@dataclass(frozen=True, slots=True)
class Withdrawing:
    """What came of the award is not known; it is released until that is acknowledged or holds nothing any more."""

    offer: Offer
    agreement: str
    until: Elapsed
    retry_at: Elapsed
    code: Code
    kind: Literal["withdrawing"] = "withdrawing"


@dataclass(frozen=True, slots=True)
class Active:
    """home_since: since when home has had a place for it all along; None: it has none. term_at: when its term is over:
    it goes on, unless another region offers better then. stays: it was moved there, and is not moved back by itself.
    returns: why it is to come home, by a live move; empty: it is not."""

    deal: Deal
    asked: str
    term_at: Elapsed
    home_since: Elapsed | None = None
    stays: bool = False
    returns: str = ""
    kind: Literal["active"] = "active"


class Stage(StrEnum):
    """serving: in the routes. settling: out of them. ending: the other side is told that it may stop."""

    SERVING = "serving"
    SETTLING = "settling"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Leaving:
    """An agreement that was noticed by either side, or breached. told: the other side knows what this stage tells it.

    ends_at: over by then. next_at: when it is told again; while settling, when that is over."""

    deal: Deal
    stage: Stage
    code: Code
    told: bool
    ends_at: Elapsed
    next_at: Elapsed


Phase = Resting | Soliciting | Awarding | Withdrawing | Active


@dataclass(frozen=True, slots=True)
class Trade:
    """better_at: until then nothing is done merely because it would be better. tries: rounds in vain since the last
    agreement, or since the documents changed. asked: hash of the documents as last seen. said: hash of the answers that
    were in vain, so that the same ones are not told to the log again and again; empty where the next are news."""

    workload: WorkloadKey
    phase: Phase = Resting(LONG_AGO)
    leaving: tuple[Leaving, ...] = ()
    better_at: Elapsed = LONG_AGO
    tries: int = 0
    asked: str = ""
    said: str = ""

    @property
    def is_over(self) -> bool:
        """Nothing to remember of it but its pauses."""
        return isinstance(self.phase, Resting) and not self.leaving


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wish:
    """How things stand, told again and again: this is the clock's tick as well. home_serves: all that is wanted at home
    is in service there. fails: this region's gateways see requests fail under the agreement that lasts, and none that
    succeeds. unmet: the agreement of which they do for long, where home has a place; empty: none. to: of MOVED, the
    region. stays: of MOVED, there is no way back. live: it comes home by a live move, which leaves the agreement when
    it is done; else at once, by notice."""

    need: Need
    asked: str
    home_serves: bool = False
    fails: bool = False
    unmet: str = ""
    to: str = ""
    stays: bool = False
    live: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """All answers of one round that came in time. terms: None when the workload must not be delegated any more.

    evidence: by region, its signed answer."""

    solicitation: str
    round: int
    answers: tuple[Answer, ...]
    terms: Terms | None
    evidence: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Granted:
    """asked_at: when the award was sent that this answers."""

    grant: Grant
    asked_at: Elapsed
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class AwardFailed:
    """refusal: of the delegate; None: its outcome is not known."""

    agreement: str
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Released:
    """The delegate holds nothing under this bid (also: it says that it knows none)."""

    bid: str


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    bid: str


@dataclass(frozen=True, slots=True)
class RenewedBy:
    renewed: Renewed
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class RenewalFailed:
    """refusal: of the delegate; None: it was not reached."""

    agreement: str
    nonce: str
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class NoticedBy:
    """The delegate's notice."""

    notice: Notice
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class NoticeTaken:
    """The delegate knows of the notice (also: it says that the agreement is over). ends_s: as it was told."""

    agreement: str
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class NoticeFailed:
    agreement: str


@dataclass(frozen=True, slots=True)
class Compared:
    """What home could do now, for an agreement that may move to the better. best: the best of other regions, which
    holds nothing; None where none was asked, or fits. live: as in Wish."""

    agreement: str
    terms: Terms
    best: Offer | None = None
    live: bool = False


Event = (
    Wish
    | Answered
    | Granted
    | AwardFailed
    | Released
    | ReleaseFailed
    | RenewedBy
    | RenewalFailed
    | NoticedBy
    | NoticeTaken
    | NoticeFailed
    | Compared
)


# -- effects: each may be carried out twice, or never, and what comes of it returns as an event ----------------------


@dataclass(frozen=True, slots=True)
class Solicit:
    """Ask for bids -> Answered. relaxation: in round 2, what replaces the policy's own requirements and limits. to: as
    in Soliciting."""

    solicitation: str
    round: int
    asked: str
    relaxation: Relaxation | None
    to: str = ""


@dataclass(frozen=True, slots=True)
class SendAward:
    """-> Granted | AwardFailed. Its gateways are filled in as they are when it is first sent."""

    region: str
    award: Award


@dataclass(frozen=True, slots=True)
class SendRelease:
    """-> Released | ReleaseFailed."""

    region: str
    release: Release


@dataclass(frozen=True, slots=True)
class SendRenewal:
    """-> RenewedBy | RenewalFailed."""

    region: str
    agreement: str
    sequence: int
    nonce: str


@dataclass(frozen=True, slots=True)
class SendNotice:
    """-> NoticeTaken | NoticeFailed."""

    region: str
    notice: Notice


@dataclass(frozen=True, slots=True)
class Compare:
    """-> Compared. abroad: with what other regions would offer, too."""

    agreement: str
    abroad: bool


@dataclass(frozen=True, slots=True)
class Account:
    """An agreement is over, or serves for a while: what it delivered goes into reputation."""

    region: str
    agreement: str
    promised_p95_s: Seconds
    breached: bool


Effect = Solicit | SendAward | SendRelease | SendRenewal | SendNotice | Compare | Account


@dataclass(frozen=True, slots=True)
class Noted:
    """What happened, for the ledger and the region's log. what: as in `types.chain`, or solicited | bid | countered |
    declined | no_bid, which are for the log alone. agreement: or the solicitation's id."""

    what: str
    agreement: str
    counterpart: str
    code: str = ""
    terms: str = ""
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class Stepped:
    """state and notes are persisted in one transaction, then effects are carried out."""

    trade: Trade
    effects: tuple[Effect, ...] = ()
    notes: tuple[Noted, ...] = ()

    def plus(self, other: "Stepped") -> "Stepped":
        return Stepped(other.trade, (*self.effects, *other.effects), (*self.notes, *other.notes))
