"""Which reports of a node can change a decision. Most cannot: their figures are those before, as exactly as decisions
know them."""

import math
from collections.abc import Mapping

from shoal.coordinator.core.fleet.commitments import MARGIN_MOST, MARGIN_SHARE, total_bytes
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.prediction.predict import LEAST_SPREAD
from shoal.types.assignment import Observed, Phase, Served
from shoal.types.device import Reading

MEMORY_SHARE = 0.25
"""Of the live memory that is always left free (`commitments.MARGIN_SHARE`): less than this more or less changes no
decision, and cannot take more than the rest of the margin either."""


def is_material(before: NodeState, after: NodeState) -> bool:
    """Whether decisions may differ after a report.

    before: the state on which they were based, not the last report, so that slow changes add up to one that counts.

    Free memory counts from a quarter of the margin on, the figures of service from the least error of a prediction on,
    power from that share of the device's power at work on. Heat and counters of requests do not: what depends on them
    looks at every report.
    """
    return (
        not is_same(before.node, after.node)
        or _situation(before) != _situation(after)
        or not is_same(before.receipts, after.receipts)
        or before.silent != after.silent
        or _reports_differently(before.observed, after.observed)
        or before.readings.keys() != after.readings.keys()
        or any(_reads_differently(after, one, after.readings[name]) for name, one in before.readings.items())
    )


def is_same_host(before: NodeState, after: NodeState) -> bool:
    """Whether two states of a node differ in nothing but reports of its replicas, figures of its devices, the set that
    it holds and the routes that it asks for: in what no replica there depends on that serves, and whose own report is
    the same."""
    return (
        is_same(before.node, after.node)
        and _service(before) == _service(after)
        and is_same(before.receipts, after.receipts)
        and before.silent == after.silent
        and before.readings.keys() == after.readings.keys()
    )


def is_same(before: object, after: object) -> bool:
    """As `==`, but an unknown figure (NaN) is the same as itself: a report repeats it."""
    return before is after or before == after or repr(before) == repr(after)


def _situation(state: NodeState) -> tuple[object, ...]:
    return (*_service(state), state.version, state.subscriptions)


def _service(state: NodeState) -> tuple[object, ...]:
    """What matters to all that serves there."""
    return (
        state.liveness,
        state.epoch,
        state.sequence == 0,
        state.connected,
        state.has_full_status,
        state.front_ready,
        state.cordoned,
        state.quarantined,
        state.revoked,
        state.link_lost,
        state.protocol,
    )


def _reports_differently(before: Mapping[str, Observed], after: Mapping[str, Observed]) -> bool:
    if before is after:
        return False
    return before.keys() != after.keys() or any(_differs(one, after[name]) for name, one in before.items())


def _differs(before: Observed, after: Observed) -> bool:
    if before is after:
        return False
    return (
        before.phase is not after.phase
        or before.code != after.code
        or before.reason != after.reason
        or before.restarts != after.restarts
        or not is_same(before.measured, after.measured)
        or not is_same(before.verdict, after.verdict)
        or before.retry_at != after.retry_at
        or before.gives_up_at != after.gives_up_at
        or (before.phase is Phase.DRAINING and before.in_flight != after.in_flight)
        or (before.sessions == 0) != (after.sessions == 0)
        or _serves_differently(before.served, after.served)
    )


def _serves_differently(before: tuple[Served, ...], after: tuple[Served, ...]) -> bool:
    """Whether a prediction from this service may differ by more than the least error that it has anyway."""
    if before == after:
        return False
    known: Mapping[str, Served] = {each.origin: each for each in before}
    return len(before) != len(after) or any(
        (old := known.get(each.origin)) is None
        or _has_moved(old.latency_p50_s, each.latency_p50_s)
        or _has_moved(old.latency_p95_s, each.latency_p95_s)
        or _has_moved(_joules(old), _joules(each))
        or _has_moved(float(old.successes), float(each.successes))
        for each in after
    )


def _joules(served: Served) -> float:
    return served.joules / max(1, served.requests)


def _reads_differently(state: NodeState, before: Reading, after: Reading) -> bool:
    device = state.device(after.device)
    if device is None or before.power != after.power or before.throttled != after.throttled:
        return True
    least = MEMORY_SHARE * min(MARGIN_SHARE * total_bytes(device, state), MARGIN_MOST)
    receipt = state.receipts.get(after.device)
    most_w = receipt.rates.active_w if receipt is not None else 0.0
    return not abs(before.free_bytes - after.free_bytes) < least or _has_moved(before.power_w, after.power_w, most_w)


def _has_moved(before: float, after: float, scale: float = 0.0) -> bool:
    """scale: what the difference is compared with, if it is more than the figures."""
    if math.isnan(before) or math.isnan(after):
        return math.isnan(before) is not math.isnan(after)
    return abs(after - before) > LEAST_SPREAD * max(abs(before), scale)
