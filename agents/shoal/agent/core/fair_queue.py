"""Which request is next, where more want to be served than a front takes at once.

Self-clocked fair queueing (Golestani, INFOCOM 1994) between tenants, by weight. A request's tag is its tenant's last
tag, or the tag of the request admitted last if that is higher, plus 1 / weight. The smallest tag is next. Requests of
one tenant keep their order.

A tenant alone never waits: slots exist so that the requests of one do not fill the front before those of another. A
request cannot be taken back. So a tenant within its weighted share of the slots never waits either, even if others hold
more than theirs: one that joins does not wait for the first one's slow requests. What tenants hold that are not alone
is at most twice the slots, and one for each tenant.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shoal.types.tenant import DEFAULT_WEIGHT
from shoal.types.units import Elapsed

ACTIVE_S: Final = 1.0
"""Seconds that a tenant counts as present after its last request: one that asks once a second always finds room."""
_NO_WEIGHTS: Final[Mapping[str, float]] = {}


@dataclass(eq=False, slots=True)
class WaitingRequest:
    """A request that waits for its turn."""

    # Whose request it is.
    tenant: str
    # Its virtual finish time: the smallest is next.
    tag: float


class FairQueue:
    """The slots of one front, and what waits for them. It belongs to one thread."""

    def __init__(self, slots: int) -> None:
        """`slots`: requests inside at once."""
        self._slots = slots
        self._weights = _NO_WEIGHTS
        self._inside: dict[str, int] = {}
        self._total = 0
        self._waiting: dict[str, deque[WaitingRequest]] = {}
        self._last_tags: dict[str, float] = {}
        """Tag of the newest waiting request, for tenants that wait."""
        self._clock = 0.0
        """Tag of the request that was admitted last."""
        self._newest = ""
        """Who asked last."""
        self._alone_since = Elapsed(0.0)
        """Since when nobody else asked."""
        self._is_alone = False

    @property
    def inside(self) -> int:
        return self._total

    @property
    def waiting(self) -> int:
        return sum(map(len, tuple(self._waiting.values())))  # also read by the thread of the metrics page

    def configure(self, weights: Mapping[str, float]) -> None:
        """Weights by tenant; others have DEFAULT_WEIGHT. Those that wait keep their tags."""
        self._weights = weights

    def resize(self, slots: int) -> None:
        self._slots = slots

    def enter(self, tenant: str, now: Elapsed) -> bool:
        """Whether the request is inside at once; otherwise it is to `wait`."""
        if tenant != self._newest:
            self._newest, self._alone_since = tenant, now
        self._is_alone = now - self._alone_since > ACTIVE_S
        if self._total >= self._slots and not self._may_exceed(tenant):
            return False
        self.force(tenant)
        return True

    def force(self, tenant: str) -> None:
        """Count a request inside that must not wait."""
        self._inside[tenant] = self._inside.get(tenant, 0) + 1
        self._total += 1

    def wait(self, tenant: str) -> WaitingRequest:
        """After `enter` refused. `next` returns it when it is inside."""
        last = self._last_tags.get(tenant, 0.0)
        found = WaitingRequest(tenant, max(self._clock, last) + 1.0 / self._weight(tenant))
        self._last_tags[tenant] = found.tag
        self._waiting.setdefault(tenant, deque()).append(found)
        return found

    def withdraw(self, request: WaitingRequest) -> None:
        """The request waits no longer."""
        self._waiting[request.tenant].remove(request)
        self._drop_if_idle(request.tenant)

    def leave(self, tenant: str) -> list[WaitingRequest]:
        """A request inside ended. Returns those that are inside in its place."""
        left = self._inside[tenant] - 1
        if left:
            self._inside[tenant] = left
        else:
            del self._inside[tenant]
        self._total -= 1
        admitted = list[WaitingRequest]()
        while self._waiting and (found := self._next()) is not None:
            self._waiting[found.tenant].popleft()
            self._drop_if_idle(found.tenant)
            self._clock = max(self._clock, found.tag)
            self.force(found.tenant)
            admitted.append(found)
        return admitted

    def _next(self) -> WaitingRequest | None:
        has_room, unit = self._is_alone or self._total < self._slots, self._unit()
        heads = (each[0] for tenant, each in self._waiting.items() if has_room or self._has_share(tenant, unit))
        return min(heads, key=lambda each: each.tag, default=None)

    def _may_exceed(self, tenant: str) -> bool:
        if tenant in self._waiting:
            return False  # it keeps its order
        return self._is_alone or self._has_share(tenant, self._unit(tenant))

    def _unit(self, *joining: str) -> float:
        """Slots for a weight of 1, among the tenants inside, waiting or joining; there is at least one."""
        return self._slots / sum(map(self._weight, {*joining, *self._inside, *self._waiting}), 0.0)

    def _has_share(self, tenant: str, unit: float) -> bool:
        """Whether the tenant holds less than its share of the slots, which is at least one."""
        return self._inside.get(tenant, 0) < max(1, int(unit * self._weight(tenant)))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, DEFAULT_WEIGHT)

    def _drop_if_idle(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            del self._last_tags[tenant]
