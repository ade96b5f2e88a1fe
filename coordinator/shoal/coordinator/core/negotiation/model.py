"""The origin's side of a trade as values: states of a workload's trade, its events, and its effects.

No field is optional depending on another field: each state has exactly the fields that hold in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from shoal.coordinator.core.negotiation.offer_selection import DelegationTerms
from shoal.types.agreement import Award, GatewayRef, Grant, Notice, Release, Renewed, ServiceState
from shoal.types.codes import Code, Refusal
from shoal.types.offer import Answer, Offer
from shoal.types.units import UNKNOWN_TIME, Elapsed, Seconds, Wall
from shoal.types.workload import Relaxation, WorkloadKey

LONG_AGO: Final = Elapsed(-math.inf)


class DelegationNeed(StrEnum):
    """What a workload needs from other regions."""

    NOTHING = "nothing"
    """It may not be delegated, or was deleted."""
    CONTENT = "content"
    """It has a local place and may not move."""
    BETTER = "better"
    """It has a local place but may move to a better one."""
    SHORT = "short"
    """It has no local place."""
    MOVED = "moved"
    """A migration takes it to one region, or left it there for good."""
    HELD = "held"
    """It moves back, and stays there until that is done."""
    HOME = "home"
    """It is to leave the other region now."""


@dataclass(frozen=True, slots=True)
class OriginAgreement:
    """What the origin knows of one agreement."""

    # `g-..`.
    id: str
    # The offer that was awarded.
    offer: Offer
    # The delegate's gateways, as of the newest renewal.
    gateways: tuple[GatewayRef, ...]
    # Length of the lease, in seconds.
    lease_s: Seconds
    # The delegate may serve until then.
    lease_until: Elapsed
    # The agreement counts as breached from then on.
    over_at: Elapsed
    # Number of the newest renewal; 0 before the first.
    sequence: int
    # Nonce of the newest renewal; empty before the first.
    nonce: str
    # When the newest renewal, or else the award, was sent.
    asked_at: Elapsed
    # When the newest renewal that was answered was sent.
    heard_at: Elapsed
    # When the next renewal is due.
    renew_at: Elapsed
    # Service state that the delegate reports.
    service: ServiceState
    # Since when `service` has this value.
    since: Elapsed
    # Certificate serials of the delegate's gateways that are refused.
    revoked: tuple[str, ...] = ()
    # Joules per inference to two digits, as the delegate meters them; None: not reported.
    joules: float | None = None
    # When it was awarded. 0: not known, because an older version wrote the trade, at first or after a rollback.
    awarded_at: Wall = UNKNOWN_TIME

    @property
    def region(self) -> str:
        return self.offer.region

    @property
    def is_serving(self) -> bool:
        """True if it was in service and nothing says that it stopped: SHORT and STOPPING still serve."""
        return self.service is not ServiceState.STARTING


@dataclass(frozen=True, slots=True)
class RegionAnswer:
    """What came of asking one region."""

    # The region.
    region: str
    # Why its answer does not do, with its figure; or why there is none.
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class IdleTrade:
    """No trade is under way."""

    # Nothing is solicited before.
    until: Elapsed
    # Why the last trade or agreement ended; None: no reason is recorded.
    refusal: Refusal | None = None
    kind: Literal["resting"] = "resting"


@dataclass(frozen=True, slots=True)
class Soliciting:
    """Regions were asked for bids."""

    # Id of the solicitation.
    solicitation: str
    # 1; 2 if it is a second round with a relaxation.
    round: int
    # Hash of the documents that it was sent for.
    asked: str
    # In round 2, the relaxation that was applied; empty in round 1.
    relaxed: str
    # Why it was sent.
    need: DelegationNeed
    # When the round began.
    asked_at: Elapsed
    # When the round counts as unanswered.
    until: Elapsed
    # The only region asked; empty: all that the policy names.
    to: str = ""
    # Discriminator of the stored form.
    kind: Literal["soliciting"] = "soliciting"


@dataclass(frozen=True, slots=True)
class Awarding:
    """An offer was awarded, and the grant is outstanding."""

    # The winning offer.
    offer: Offer
    # The award, sent again unchanged at `retry_at`.
    award: Award
    # Hash of the documents that it was solicited for.
    asked: str
    # End of the hold.
    until: Elapsed
    # When the award is sent again.
    retry_at: Elapsed
    # When it was made; 0: not known, as in OriginAgreement.
    awarded_at: Wall = UNKNOWN_TIME
    # Discriminator of the stored form.
    kind: Literal["awarding"] = "awarding"


@dataclass(frozen=True, slots=True)
class Withdrawing:
    """The result of an award is unknown. It is released until the delegate confirms, or until it cannot hold
    anything any longer."""

    # The offer that was awarded.
    offer: Offer
    # Id of the agreement in the award.
    agreement: str
    # From then on the award holds nothing.
    until: Elapsed
    # When the release is sent again.
    retry_at: Elapsed
    # Why it is withdrawn.
    code: Code
    # When it was awarded; 0: not known, as in OriginAgreement.
    awarded_at: Wall = UNKNOWN_TIME
    # Discriminator of the stored form.
    kind: Literal["withdrawing"] = "withdrawing"


@dataclass(frozen=True, slots=True)
class Active:
    """Another region runs the workload, or is starting to."""

    # The agreement under which it does.
    agreement: OriginAgreement
    # Hash of the documents that it was made for.
    asked: str
    # End of its term. It continues unless another region offers better then.
    term_at: Elapsed
    # Since when the local region has had a place for it without a break; None: it has none.
    home_since: Elapsed | None = None
    # A move took it there, and it does not come back by itself.
    stays: bool = False
    # Why a live move is to bring it back; empty: none is.
    returns: str = ""
    # Discriminator of the stored form.
    kind: Literal["active"] = "active"


class LeavingStage(StrEnum):
    """How far the end of an agreement has got."""

    SERVING = "serving"
    """It is in the routes."""
    SETTLING = "settling"
    """It has just left the routes."""
    ENDING = "ending"
    """The other side is informed that it may stop."""


@dataclass(frozen=True, slots=True)
class LeavingAgreement:
    """An agreement that either side gave notice of, or that was breached."""

    # The agreement, with its newest renewal.
    agreement: OriginAgreement
    # How far its end has got.
    stage: LeavingStage
    # Reason of the notice; BREACHED after a breach.
    code: Code
    # The other side has confirmed the message of this stage.
    told: bool
    # It is over by then.
    ends_at: Elapsed
    # When that message is sent again; while SETTLING, the end of this stage.
    next_at: Elapsed


TradePhase = IdleTrade | Soliciting | Awarding | Withdrawing | Active


@dataclass(frozen=True, slots=True)
class WorkloadTrade:
    """The trade of one workload."""

    # Workload of this region.
    workload: WorkloadKey
    # State of its current trade.
    phase: TradePhase = IdleTrade(LONG_AGO)
    # Agreements that are ending, oldest first.
    leaving: tuple[LeavingAgreement, ...] = ()
    # No attempt at mere improvement before this time.
    better_at: Elapsed = LONG_AGO
    # Rounds without a result since the last agreement, or since the documents changed.
    tries: int = 0
    # Hash of the documents as last seen.
    asked: str = ""
    # Hash of the last unsuccessful answers, so that equal ones are not logged again; empty: the next are logged.
    said: str = ""
    # What came of asking each region in the last round, if that had no winner: the nearest to winning first.
    answers: tuple[RegionAnswer, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if there is nothing to remember but its pauses."""
        return isinstance(self.phase, IdleTrade) and not self.leaving

    @property
    def active_agreement(self) -> OriginAgreement | None:
        """The agreement that lasts: neither side has given notice."""
        match self.phase:
            case Active(agreement=agreement):
                return agreement
            case IdleTrade() | Soliciting() | Awarding() | Withdrawing():
                return None

    @property
    def agreements(self) -> tuple[OriginAgreement, ...]:
        """Agreements that are not over, the lasting one first."""
        agreement = self.active_agreement
        return (*(() if agreement is None else (agreement,)), *(each.agreement for each in self.leaving))


# -- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DelegationDemand:
    """What a workload needs now. It is sent repeatedly, and serves as the clock's tick too."""

    # What it needs from other regions.
    need: DelegationNeed
    # Hash of its documents.
    request_hash: str
    # All replicas wanted locally are in service.
    is_served_locally: bool = False
    # This region's gateways see requests fail under the lasting agreement, and none succeed.
    is_failing: bool = False
    # The agreement for which this has held for long while there is a local place; empty: none.
    failing_agreement: str = ""
    # For MOVED: the region.
    to: str = ""
    # For MOVED: only another move brings it back.
    is_permanent: bool = False
    # A return is a live move, which ends the agreement when it is done; False: notice is given at once.
    by_live_move: bool = False


@dataclass(frozen=True, slots=True)
class RoundAnswered:
    """All answers of one round that came in time."""

    # Id of the solicitation.
    solicitation: str
    # 1; 2 if it is a second round with a relaxation.
    round: int
    # The answers, in the order of arrival.
    answers: tuple[Answer, ...]
    # What to judge them by; None: the workload may not be delegated any longer.
    terms: DelegationTerms | None
    # Signed answer of each region.
    evidence: Mapping[str, bytes] = field(default_factory=dict)
    # By region that the policy would delegate to, why nothing came from it.
    unheard: Mapping[str, Refusal] = field(default_factory=dict)
    # When the last one came, which is when the best of them is awarded; 0: not known.
    at: Wall = UNKNOWN_TIME


@dataclass(frozen=True, slots=True)
class AwardGranted:
    """The delegate granted the award."""

    # The delegate's answer: agreement, lease and gateways.
    grant: Grant
    # When the award was sent that this answers.
    asked_at: Elapsed
    # Signed message of the delegate; empty: none.
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class AwardFailed:
    """The award was refused, or got no answer."""

    # Id of the agreement in the award.
    agreement: str
    # The delegate's; None: the result is unknown.
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class ReleaseConfirmed:
    """The delegate holds nothing under this bid, or does not know it."""

    bid: str


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    bid: str


@dataclass(frozen=True, slots=True)
class RenewalConfirmed:
    renewal: Renewed
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class RenewalFailed:
    """A renewal was refused, or got no answer."""

    # Id of the agreement.
    agreement: str
    # Nonce of the renewal.
    nonce: str
    # The delegate's; None: it was not reached.
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class DelegateNotice:
    """The delegate gave notice."""

    notice: Notice
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class NoticeConfirmed:
    """The delegate knows of the notice, or says that the agreement is over."""

    # Id of the agreement.
    agreement: str
    # As in the notice sent, in seconds.
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class NoticeFailed:
    agreement: str


@dataclass(frozen=True, slots=True)
class ComparisonDone:
    """The local region's current figures, for an agreement that may move to something better."""

    # Id of the agreement.
    agreement: str
    # Terms with those figures.
    terms: DelegationTerms
    # The best offer of other regions, which holds nothing; None: none was asked, or none fits.
    best: Offer | None = None
    # As in DelegationDemand.
    by_live_move: bool = False


TradeEvent = (
    DelegationDemand
    | RoundAnswered
    | AwardGranted
    | AwardFailed
    | ReleaseConfirmed
    | ReleaseFailed
    | RenewalConfirmed
    | RenewalFailed
    | DelegateNotice
    | NoticeConfirmed
    | NoticeFailed
    | ComparisonDone
)


# -- effects: each may be performed twice or never; the result returns as an event -------------------------------------


@dataclass(frozen=True, slots=True)
class Solicit:
    """Ask for bids -> RoundAnswered."""

    # Id of the solicitation.
    solicitation: str
    # 1; 2 if it is a second round with a relaxation.
    round: int
    # Hash of the documents that it is sent for.
    request_hash: str
    # In round 2, what replaces the policy's own requirements and limits; None in round 1.
    relaxation: Relaxation | None
    # The only region to ask; empty: all that the policy names.
    to: str = ""


@dataclass(frozen=True, slots=True)
class SendAward:
    """Send the award -> AwardGranted | AwardFailed. Its gateways are filled in when it is first sent."""

    region: str
    award: Award


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Send the release -> ReleaseConfirmed | ReleaseFailed."""

    region: str
    release: Release


@dataclass(frozen=True, slots=True)
class SendRenewal:
    """Send the renewal -> RenewalConfirmed | RenewalFailed."""

    region: str
    agreement: str
    sequence: int
    nonce: str


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send the notice -> NoticeConfirmed | NoticeFailed."""

    region: str
    notice: Notice


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare an agreement with the alternatives -> ComparisonDone."""

    # Id of the agreement.
    agreement: str
    # Ask other regions for indicative offers, too.
    with_other_regions: bool


@dataclass(frozen=True, slots=True)
class RecordDelivery:
    """An agreement is over, or has served for a while: its delivery counts towards the region's reputation."""

    # Region that served under the agreement.
    region: str
    # Id of the agreement.
    agreement: str
    # p95 promised in its offer, in seconds.
    promised_p95_s: Seconds
    # It ended in a breach.
    breached: bool


TradeEffect = Solicit | SendAward | SendRelease | SendRenewal | SendNotice | Compare | RecordDelivery


@dataclass(frozen=True, slots=True)
class TradeNote:
    """An entry for the ledger and the region's log."""

    # As in `types.chain`; or, for the log alone: solicited, bid, countered, declined, no_bid.
    what: str
    # Id of the agreement, or of the solicitation.
    agreement: str
    # The other region; empty: none.
    counterpart: str
    # Reason, e.g. of a notice or a refusal; empty: none.
    code: str = ""
    # Details in words, e.g. the terms of an offer; empty: none.
    terms: str = ""
    # Signed message of the counterpart; empty: none.
    evidence: bytes = b""


@dataclass(frozen=True, slots=True)
class TradeStep:
    """Trade and notes are persisted in one transaction; then the effects are performed."""

    trade: WorkloadTrade
    effects: tuple[TradeEffect, ...] = ()
    notes: tuple[TradeNote, ...] = ()

    def plus(self, other: "TradeStep") -> "TradeStep":
        return TradeStep(other.trade, (*self.effects, *other.effects), (*self.notes, *other.notes))
