"""What this region experienced of others: stored with the trades that it comes from, and reported to the federation."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import reduce
from typing import Any, Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.federation.access import FEDERATION_S, FederationAccess
from shoal.coordinator.controllers.federation.ledger import Ledger, LedgerWrites
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.runner import Transition, TransitionRunner
from shoal.coordinator.core.negotiation import reputation
from shoal.coordinator.core.negotiation.model import OriginAgreement, RecordDelivery, TradeEffect
from shoal.coordinator.ports import FederationLink
from shoal.types.agreement import Delivered, ReportContent, ServiceReport
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Elapsed, Seconds

REPUTATION: Final = "reputation"
ACCOUNT_INTERVAL_S: Final = Seconds(60.0)
"""Interval at which a live agreement's delivery counts in its region's reputation."""
REPORTS_MOST: Final = 1000
REPORT_INTERVAL_S: Final = Seconds(10.0)
ENTRIES_MOST: Final = 200
"""Ledger entries in one report. Every REPORT_INTERVAL_S the federation gets deliveries and copies of entries."""
ENTRY_CHARS_MOST: Final = 2**19
"""Characters of all texts of these, so that a report stays below the 4 MiB of a message."""


@dataclass(frozen=True, slots=True)
class Reputation:
    """What this region experienced of others."""

    # By region, from this region's own experience.
    trust: Mapping[str, float] = field(default_factory=dict)
    # Deliveries that the federation has not received yet.
    unreported: tuple[Delivered, ...] = ()


class ReputationRepository:
    """The reputation as stored. A trade that ends an agreement writes it in its own transaction."""

    def __init__(
        self,
        context: ControllerContext,
        ledger: Ledger,
        access: FederationAccess,
        service_report: Callable[[str], ServiceReport],
        writing: asyncio.Lock,
    ) -> None:
        """service_report: counts under an agreement now. writing: held while trades are written, too."""
        self.current = Reputation()
        self._store = context.store
        self._clock = context.clock
        self._meter = context.meter
        self._ledger = ledger
        self._access = access
        self._service_report = service_report
        self._writing = writing
        self._runner = TransitionRunner[str, LedgerWrites](ledger.commit, self.read_again)
        self._last_accounts: dict[str, tuple[Elapsed, int]] = {}
        self._report_at = Elapsed(-math.inf)
        self._next_entry: int | None = None
        """Sequence of the first ledger entry that the federation lacks; None before the first report."""
        self._history = ""
        """History of the store that this counts in: in another one the federation may lack other entries."""
        self._is_without_entries = False
        """Whether the newest report had deliveries alone, because the one before it was refused."""
        self.report_refusal: Refusal | None = None
        """Why the federation refuses this region's reports of its ledger; None: it does not."""

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        found = await self._store.read(REPUTATION)
        if found is not None:
            self.current = codec.load(Reputation, found.value)

    @property
    def trust(self) -> Mapping[str, float]:
        """Trust by region. This region's own experience takes precedence over the directory."""
        return {**{each.region: each.trust for each in self._access.members}, **self.current.trust}

    def after(self, effects: Iterable[TradeEffect]) -> Reputation:
        """The reputation with the deliveries that a trade's step records."""
        ends = [each for each in effects if isinstance(each, RecordDelivery)]
        return reduce(_with_delivery, map(self._delivery, ends), self.current)

    def adopt(self, stored: Reputation) -> None:
        self.current = stored

    async def read_again(self, key: str, doubtful: Transition[LedgerWrites, Any]) -> Callable[[], None]:
        """Adopts the stored reputation, if the transition was to write it."""
        if doubtful.writes is None or key not in doubtful.writes.puts:
            return lambda: None
        record = await self._store.read(key)
        stored = codec.load(Reputation, record.value) if record is not None else Reputation()
        return lambda: self.adopt(stored)

    async def account(self, agreements: Iterable[OriginAgreement]) -> None:
        """Counts agreements while they last. Or else a region that lies could win everything before its first agreement
        ends.
        """
        now, lasting, known = self._clock.now(), list[Delivered](), dict[str, tuple[Elapsed, int]]()
        for each in agreements:
            at, counted = known[each.id] = self._last_accounts.get(each.id, (now, 0))
            if now - at < ACCOUNT_INTERVAL_S:
                continue
            promised_s = each.offer.latency_p95_s
            delivered = self._delivery(RecordDelivery(each.region, each.id, promised_s, breached=False))
            known[each.id] = (now, delivered.requests)
            lasting += [delivered] if delivered.requests > counted else []
        self._last_accounts = known
        if lasting:
            await self._update(lambda current: reduce(_with_delivery, lasting, current))

    def next_report(self) -> Coroutine[Any, Any, None] | None:
        """The report to the federation that is due now; None: none is."""
        federation = self._access.federation
        if federation is None or self._clock.now() < self._report_at:
            return None
        self._report_at = Elapsed(self._clock.now() + REPORT_INTERVAL_S)
        return self._report(federation)

    async def _report(self, federation: FederationLink) -> None:
        unreported = self.current.unreported
        if self._history != self._ledger.history:
            self._history, self._next_entry = self._ledger.history, None
        # Every other report after a refused one has no entries, so that deliveries count whatever the ledger holds.
        alone = self._is_without_entries = bool(
            self.report_refusal is not None and unreported and not self._is_without_entries
        )
        entries = () if alone else await self._next_entries()
        if self._next_entry is not None and not unreported and not entries:
            return
        try:
            async with asyncio.timeout(FEDERATION_S):
                self._next_entry = max(1, await federation.report(ReportContent(unreported, entries, self._history)))
        except (TimeoutError, ShoalError) as error:
            self._meter.count(metrics.REPORTS_FAILED)
            if isinstance(error, ShoalError) and error.code is not Code.FEDERATION_UNREACHABLE:
                self.report_refusal = error.refusal
            return
        self.report_refusal = self.report_refusal if alone else None
        if unreported:
            reported = frozenset(unreported)
            await self._update(
                lambda now: replace(now, unreported=tuple(each for each in now.unreported if each not in reported))
            )

    async def _next_entries(self) -> tuple[LedgerEntry, ...]:
        """The entries that the federation lacks, as many as one report may have; none before the first report."""
        if self._next_entry is None:
            return ()
        entries, chars = await self._ledger.entries_after(self._next_entry - 1, ENTRIES_MOST), 0
        for count, entry in enumerate(entries):
            chars += sum(len(value) for value in astuple(entry) if isinstance(value, str))
            if count and chars > ENTRY_CHARS_MOST:
                return entries[:count]
        return entries

    async def _update(self, change: Callable[[Reputation], Reputation]) -> None:
        def step() -> Transition[LedgerWrites, None]:
            after = change(self.current)
            return Transition(None, LedgerWrites({REPUTATION: codec.dump(after)}), lambda _: self.adopt(after))

        async with self._writing:
            try:
                await self._runner.run(REPUTATION, step)
            except ShoalError:
                self._meter.count(metrics.TRADE_WRITES_FAILED)

    def _delivery(self, account: RecordDelivery) -> Delivered:
        """Delivered service as this region's gateways measured it, minus the RTT."""
        seen = self._service_report(account.agreement)
        rtt_s = self._access.rtt().get(account.region, 0.0)
        return Delivered(
            region=account.region,
            agreement=account.agreement,
            promised_p95_s=account.promised_p95_s,
            delivered_p95_s=Seconds(max(0.0, seen.latency_p95_s - rtt_s)),
            requests=seen.requests,
            breached=account.breached,
        )


def _with_delivery(before: Reputation, delivered: Delivered) -> Reputation:
    unreported = (*before.unreported, delivered)[-REPORTS_MOST:]
    return Reputation(reputation.with_delivery(before.trust, delivered), unreported)
