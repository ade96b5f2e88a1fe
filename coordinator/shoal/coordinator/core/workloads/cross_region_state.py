"""States of a workload's cross-region migration, as placement, routes and the trade read them.

Each state has exactly the fields that hold in it. `region` is the other region: target of an outbound migration, source
of an inbound one. `agreement` is the only agreement that the state is about; empty until there is one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MovingOut:
    """It moves to the other region. The local replicas serve the rest of the requests."""

    region: str
    agreement: str
    # Share of the requests that go there, 0 to 1.
    share: float


@dataclass(frozen=True, slots=True)
class DrainingHere:
    """The other region takes all requests, and the local replicas finish theirs."""

    region: str
    agreement: str
    # An operator moved it: only another move brings it back.
    is_permanent: bool


@dataclass(frozen=True, slots=True)
class MovedForGood:
    """An operator moved it to the other region: only another move brings it back."""

    region: str
    agreement: str


@dataclass(frozen=True, slots=True)
class MoveOutFailed:
    """It stays in this region. The agreement is to be ended."""

    region: str
    agreement: str
    # The other region's answers are wrong: it gets no request, even if the local region has no replica.
    has_wrong_answers: bool
    # The migration is over, and its cooldown runs.
    is_over: bool


@dataclass(frozen=True, slots=True)
class MovingBack:
    """It moves back to this region. The local replicas serve the rest of the requests."""

    region: str
    agreement: str
    # Share of the requests that still go to the other region, 0 to 1.
    share: float


@dataclass(frozen=True, slots=True)
class MoveBackFailed:
    """It stays in the other region, which takes all requests again."""

    region: str
    agreement: str


@dataclass(frozen=True, slots=True)
class DrainingThere:
    """The local replicas take all requests. The agreement is to be ended."""

    region: str
    agreement: str


@dataclass(frozen=True, slots=True)
class ReturnCooldown:
    """It came back recently, and leaves again only if it must."""

    region: str
    agreement: str
    # It stays for as long as its documents have this hash; empty: whatever they say.
    request_hash: str


CrossRegionState = (
    MovingOut
    | DrainingHere
    | MovedForGood
    | MoveOutFailed
    | MovingBack
    | MoveBackFailed
    | DrainingThere
    | ReturnCooldown
)


def remote_share(state: CrossRegionState) -> float:
    """Share of the requests that go to the other region, 0 to 1."""
    match state:
        case MovingOut(share=share) | MovingBack(share=share):
            return share
        case DrainingHere() | MovedForGood() | MoveBackFailed():
            return 1.0
        case MoveOutFailed() | DrainingThere() | ReturnCooldown():
            return 0.0


def is_wanted_here(state: CrossRegionState) -> bool:
    """True if the workload is to have replicas in this region."""
    match state:
        case MovingOut() | MoveOutFailed() | MovingBack() | DrainingThere() | ReturnCooldown():
            return True
        case DrainingHere() | MovedForGood() | MoveBackFailed():
            return False


def is_over(state: CrossRegionState) -> bool:
    """True if the migration is over, whatever its result."""
    match state:
        case MoveOutFailed(is_over=over):
            return over
        case MovedForGood() | ReturnCooldown():
            return True
        case MovingOut() | DrainingHere() | MovingBack() | MoveBackFailed() | DrainingThere():
            return False


def has_given_up_agreement(state: CrossRegionState) -> bool:
    """True if the agreement is to be ended."""
    match state:
        case MoveOutFailed() | DrainingThere():
            return True
        case MovingOut() | DrainingHere() | MovedForGood() | MovingBack() | MoveBackFailed() | ReturnCooldown():
            return False


def has_wrong_answers(state: CrossRegionState) -> bool:
    """True if the other region's answers are wrong, so that it gets no request."""
    match state:
        case MoveOutFailed(has_wrong_answers=wrong):
            return wrong
        case (
            MovingOut()
            | DrainingHere()
            | MovedForGood()
            | MovingBack()
            | MoveBackFailed()
            | DrainingThere()
            | ReturnCooldown()
        ):
            return False
