"""Choosing a workload's replicas at one setting of what may give."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.coordinator.core.fleet.commitments import NOTHING, admissible_bytes
from shoal.coordinator.core.placement.books import Books, Held, busy_share, wants_standby
from shoal.coordinator.core.placement.feasible import HARD, Fault, Option, Order, Scope, memory_fault, utilisation_fault
from shoal.coordinator.core.placement.model import Move, Slot, terms_of
from shoal.coordinator.core.placement.rank import gain, score, tie, values
from shoal.coordinator.core.placement.relax import CATEGORY, Give, physical
from shoal.coordinator.core.placement.standing import Current, Fallen, Standing
from shoal.types.codes import Code, Refusal
from shoal.types.units import Bytes, show_bytes
from shoal.types.workload import Intent, Limits, Requirements, Spread

UTILISATION_MOST = 0.7
"""Declared traffic may fill this share of a device: at 0.7 an M/D/1 queue adds about one service time."""
BROKEN_MOST = 3
"""Replicas of one workload that may lie broken before it is tried nowhere else: one bad model does not tour a fleet."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen replica. keeps: the current one that it is; None: a new one. moves: what waited for this place."""

    option: Option
    keeps: Standing | None
    moves: Move | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One setting, worked through. faults: by option; empty for those that were picked or only were not the best.
    evicted: ids of replicas that run beyond their tenant's quota. standby: beside the picks; no_standby: why there is
    none although one is asked for."""

    require: Requirements
    limits: Limits
    wanted: int
    picks: tuple[Pick, ...]
    evicted: tuple[str, ...]
    faults: tuple[tuple[Fault, ...], ...]
    books: Books
    standby: Pick | None = None
    no_standby: Refusal | None = None

    @property
    def full(self) -> bool:
        return len(self.picks) >= self.wanted


class Occupied(NamedTuple):
    """Where a replica is, and what it takes there."""

    assignment: str
    slot: Slot
    memory: Bytes


class Solver:
    """One workload against the books of all others."""

    def __init__(
        self, scope: Scope, intent: Intent, current: Current, cap: int, books: Books, opening: Books, *,
        elsewhere: bool = False, moving: Sequence[Move] = (),
    ) -> None:  # fmt: skip
        """cap: current replicas that the quota lets stay. books: with all that was decided before.
        opening: without, and as if nothing of that stood already. elsewhere: nothing is wanted here but a standby.
        moving: what shall find a place, each where it aims; their sources do not count among the current."""
        self.moving = moving
        self.scope = scope
        self.intent = intent
        self.elsewhere = elsewhere
        self.standing = current.standing
        self.reserve = current.reserve
        self.fallen = current.fallen
        self.cap = cap
        self.books = books.undecided(scope, intent, current, -1)
        self.opening = opening.undecided(scope, intent, current, -1)
        self.terms = terms_of(intent)
        self.broken = tuple(each for each in current.fallen if each.assignment.id in scope.inputs.broken)
        self._levels = dict[tuple[Requirements, Limits], Level]()

    @property
    def counted(self) -> tuple[Standing, ...]:
        return (*self.standing, *self.reserve)

    def moved(self, current: Current, moving: Sequence[Move], freed: Occupied | None = None) -> "Solver":
        """The same workload, `current` as it would be with these of its moves under way. freed: a replica that would
        be gone before what comes in its place is loaded."""
        books, opening = (each.undecided(self.scope, self.intent, current, 1) for each in (self.books, self.opening))
        if freed is not None:
            books, opening = (each.freed(freed.slot, freed.memory) for each in (books, opening))
        return Solver(
            self.scope, self.intent, current, self.cap, books, opening, elsewhere=self.elsewhere, moving=moving
        )

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Every (device, model) of the region; one that a current replica holds, as it measures there."""
        scope, intent = self.scope, self.intent
        held = {(*each.slot, each.assignment.model): each.option for each in self.counted}
        failed = {(each.node, each.assignment.device, each.assignment.model): each.refusal for each in self.broken}
        return tuple(
            held.get((state.name, device.name, model.digest))
            or scope.option(intent, model, state, device, broken=failed.get((state.name, device.name, model.digest)))
            for model in intent.models
            if model.digest in scope.inputs.profiles
            for state, device in scope.devices
        )

    def unmoved(self) -> Level | None:
        """The level at which nothing needs deciding: all that is wanted stands, confirmed under the terms of now."""
        require = self.intent.require
        wanted = self._wanted(require)
        if len(self.standing) != wanted or len(self.reserve) != wants_standby(self.intent):
            return None
        if self.cap != len(self.counted):
            return None
        if not all(self.confirmed(each) and self._still_meets(each, require) for each in self.counted):
            return None
        books = self.books
        picks = list[Pick]()
        for each in self.standing:
            if not spread_allows(each.option, picks, require):
                return None  # one that had fallen came back beside its replacement
            picks.append(Pick(each.option, each))
            books = books.kept(self.scope, self.intent, each)
        standby = next((Pick(each.option, each) for each in self.reserve), None)
        if standby is not None and standby.keeps is not None:
            if not is_apart(standby.option, picks):
                return None
            books = books.kept(self.scope, self.intent, standby.keeps)
        return Level(require, self.intent.limits, wanted, tuple(picks), (), (), books, standby)

    def solve(self, require: Requirements, limits: Limits) -> Level:
        """Pick replicas one by one, best first. A current one that is confirmed stays; one whose documents changed
        yields to what its policy calls a gain; one that stands by takes over before a new one comes. Worked out once:
        why a move waits is read from what found no place for it."""
        known = self._levels.get((require, limits))
        if known is None:
            known = self._levels[require, limits] = self._solve(require, limits)
        return known

    def _solve(self, require: Requirements, limits: Limits) -> Level:
        scope, intent, options = self.scope, self.intent, self.options
        wanted = self._wanted(require)
        faults = [scope.faults(option, intent, require, limits) for option in options]
        staying = [each for each in self.standing if self.confirmed(each) and self._still_meets(each, require)]
        yielding = [
            each for each in self.standing if not self.confirmed(each) and self._may_stay(each, require, limits)
        ]
        relief = [each for each in self.reserve if self._may_stay(each, require, limits)]
        rank = self._rank(faults, (*staying, *yielding, *relief), require)
        order = [index for index in sorted(rank, key=rank.__getitem__) if not faults[index]]
        places = {options[index].names: place for index, place in rank.items()}
        for each in (staying, yielding, relief):
            each.sort(key=lambda one: (not one.ready, places[one.option.names], one.assignment.id))
        picks = list[Pick]()
        books = self.books
        while len(picks) < wanted:
            left = (*staying, *yielding)
            if self._capped(picks) and any(spread_allows(each.option, picks, require) for each in left):
                break  # the quota gives up one that stands: then nothing new may come in its place
            keeps = self._first(staying, picks, require)
            best, move = None, None
            if keeps is None:
                move = self._next_move(picks)
                best = self._best(order, picks, require, books, move)
                keeps = self._first(yielding, picks, require)
                if keeps is None and move is None:
                    keeps = self._first(relief, picks, require)
                elif keeps is not None and best is not None and self._betters(best, keeps, require):
                    keeps = None
            if keeps is not None:
                next(each for each in (staying, yielding, relief) if keeps in each).remove(keeps)
                picks.append(Pick(keeps.option, keeps))
                books = self._with(picks[-1], books, require)
            elif best is not None:
                picks.append(Pick(best, None, move))
                books = self._with(picks[-1], books, require)
            else:
                break
        full = len(picks) >= wanted
        standby, short = None, None
        if wants_standby(intent):
            late = (each for each in self.reserve if each not in relief and all(each is not one.keeps for one in picks))
            left = (*relief, *late, *staying, *yielding)
            standby, short = self._standby(left, picks, require, limits, faults, order, books)
        picked = {pick.option.names for pick in picks}
        if standby is not None:
            picked.add(standby.option.names)
            books = self._with(standby, books, require)
        judged = tuple(
            ()
            if option.names in picked
            else found or self._left_out(option, picks, require, self.books if full else books)
            for option, found in zip(options, faults, strict=True)
        )
        beyond = (*staying, *yielding) if not full and self._capped(picks) else ()
        evicted = tuple(each.assignment.id for each in beyond)
        return Level(require, limits, wanted, tuple(picks), evicted, judged, books, standby, short)

    def places(self, require: Requirements, limits: Limits) -> Iterator[Option]:
        """Where one more replica could come now beside those that stand, but where one of them is or was: for what may
        move there, whatever it would be worth."""
        if self.gave_up:
            return
        picks = [Pick(each.option, each) for each in self.standing]
        books = self.books
        for pick in picks:
            books = self._with(pick, books, require)
        taken = {each.option.names for each in self.counted}
        taken |= {(each.node, each.assignment.device, each.assignment.model) for each in self.fallen}
        for option in self.options:
            if option.names in taken or self.scope.faults(option, self.intent, require, limits):
                continue
            if not self._crowded(option, picks, require, books):
                yield option

    def confirmed(self, current: Standing | Fallen) -> bool:
        """Was this replica chosen, or confirmed, under the very terms that hold now?"""
        return self.scope.inputs.terms.get(current.assignment.id) == self.terms

    @property
    def gave_up(self) -> bool:
        """Did it fail on so many devices, under the terms of now, that no other is tried?"""
        return sum(self.confirmed(each) for each in self.broken) >= BROKEN_MOST

    def _wanted(self, require: Requirements) -> int:
        """Replicas for requests."""
        return 0 if self.elsewhere else require.replicas

    def _with(self, pick: Pick, books: Books, require: Requirements) -> Books:
        if pick.keeps is not None:
            return books.kept(self.scope, self.intent, pick.keeps)
        busy = busy_share(self.scope, self.intent, pick.option, require.replicas)
        return books.added(self.intent.key.tenant, pick.option.slot, memory_needed(pick.option), busy)

    # -- who stands by -----------------------------------------------------------------------------------------------

    def _standby(
        self, left: Sequence[Standing], picks: Sequence[Pick], require: Requirements, limits: Limits,
        faults: Sequence[tuple[Fault, ...]], order: Sequence[int], books: Books,
    ) -> tuple[Pick | None, Refusal | None]:  # fmt: skip
        """One more replica, on a node without any of the others: one that is there, else a new one once all others
        are. What is only slower than asked stands by where nothing else can: a late answer is better than none."""
        capped = self._capped(picks)
        apart = [each for each in left if not capped and is_apart(each.option, picks)]
        stays = [each for each in apart if self._still_meets(each, require)]
        stays.sort(key=lambda each: (not each.ready, not each.assignment.standby))  # stable: of equals the best
        fits = next((each for each in stays if self.confirmed(each) or self._may_stay(each, require, limits)), None)
        if fits is not None or len(picks) < self._wanted(require):
            kept = fits or next(iter(stays), None)
            return (Pick(kept.option, kept) if kept is not None else None), None
        if self.gave_up:
            return None, _no_standby(Counter(each.refusal.code for each in self.broken))
        if capped and left:
            return None, _no_standby(Counter([Code.QUOTA]))
        waiting = {each.option.names for each in left}
        bars = [
            [
                *(found.refusal.code for found in faults[index] if found.order is not Order.LATENCY),
                *(() if is_apart(option, picks) else (Code.SPREAD_CONFLICT,)),
                *(found.refusal.code for found in self._taken(option, require, books)),
                *((Code.WAITING_FOR_REPLACEMENT,) if option.names in waiting else ()),
            ]
            for index, option in enumerate(self.options)
        ]
        best = next((index for index in order if not bars[index]), None)
        if best is None and stays:
            return Pick(stays[0].option, stays[0]), None
        if best is None:
            able = [index for index, found in enumerate(bars) if not found]
            late = {index: self.scope.latency_s(self.options[index], self.intent, require.replicas) for index in able}
            best = min(able, key=lambda index: (late[index], self.options[index].names), default=None)
        if best is None:
            return None, _no_standby(Counter(found[0] for found in bars))
        return Pick(self.options[best], None), None

    # -- what may stay -----------------------------------------------------------------------------------------------

    def _still_meets(self, standing: Standing, require: Requirements) -> bool:
        return not any(fault.order in HARD for fault in self.scope.document_faults(standing.option, require))

    def _may_stay(self, standing: Standing, require: Requirements, limits: Limits) -> bool:
        """Under changed documents everything is asked again but the node's state: it takes nothing new here."""
        found = self.scope.faults(standing.option, self.intent, require, limits)
        return all(fault.order is Order.NODE for fault in found)

    def _betters(self, best: Option, standing: Standing, require: Requirements) -> bool:
        new = values(self.scope, best, self.intent, require.replicas)
        old = values(self.scope, standing.option, self.intent, require.replicas)
        return gain(new, old, self.intent.weights) >= self.intent.migration.gain

    def _first(self, current: Sequence[Standing], picks: list[Pick], require: Requirements) -> Standing | None:
        if self._capped(picks):
            return None
        return next((each for each in current if spread_allows(each.option, picks, require)), None)

    def _capped(self, picks: Sequence[Pick]) -> bool:
        return sum(pick.keeps is not None for pick in picks) >= self.cap

    # -- what may come -----------------------------------------------------------------------------------------------

    def _rank(
        self, faults: Sequence[tuple[Fault, ...]], current: Sequence[Standing], require: Requirements
    ) -> dict[int, tuple[float, bytes]]:
        """Score and tie-break by option, over those that fit or stand."""
        stands = {each.option.names for each in current}
        fits = [index for index, found in enumerate(faults) if not found or self.options[index].names in stands]
        figures = [values(self.scope, self.options[index], self.intent, require.replicas) for index in fits]
        _, scores = score(figures, self.intent.weights)
        return {
            index: (value, tie(self.scope.inputs.seed, str(self.intent.key), *self.options[index].names))
            for index, value in zip(fits, scores, strict=True)
        }

    def _next_move(self, picks: Sequence[Pick]) -> Move | None:
        found = sum(pick.moves is not None for pick in picks)
        return self.moving[found] if found < len(self.moving) else None

    def _best(
        self, order: Sequence[int], picks: list[Pick], require: Requirements, books: Books, move: Move | None
    ) -> Option | None:
        if self.gave_up:
            return None
        left = {(each.node, each.assignment.device, each.assignment.model) for each in self.fallen if move is not None}
        kept = {pick.keeps.assignment.id for pick in picks if pick.keeps is not None}
        waiting = {each.option.names for each in self.counted if each.assignment.id not in kept}
        for index in order:
            option = self.options[index]
            if move is not None and (option.names in left or not move.aim.allows(*option.names)):
                continue
            if option.names not in waiting and not self._crowded(option, picks, require, books):
                return option
        return None

    def _left_out(self, option: Option, picks: list[Pick], require: Requirements, books: Books) -> tuple[Fault, ...]:
        """What kept an option out that is fit by itself. When all replicas are placed, the picks did not."""
        found = self._crowded(option, picks, require, books)
        full = len(picks) >= self._wanted(require)
        return tuple(fault for fault in found if not full or fault.order is not Order.SPREAD)

    def _crowded(self, option: Option, picks: list[Pick], require: Requirements, books: Books) -> tuple[Fault, ...]:
        """Constraints that depend on what else is placed."""
        taken = self._taken(option, require, books)
        return taken if spread_allows(option, picks, require) else (*taken, _spread_fault(option, require))

    def _taken(self, option: Option, require: Requirements, books: Books) -> tuple[Fault, ...]:
        """Room and quota."""
        held = books.held.get(self.intent.key.tenant, Held())
        quota = self._quota(held.plus(1, memory_needed(option)))
        return (*self._no_room(option, require, books), *((quota,) if quota is not None else ()))

    def _no_room(self, option: Option, require: Requirements, books: Books) -> tuple[Fault, ...]:
        """Memory and time of the device; OUTRANKED where they went to workloads that were decided before this one."""
        found = self._short(option, require, books)
        if found and self._short(option, require, self.books) and not self._short(option, require, self.opening):
            slot = f"{option.slot.node}/{option.slot.device}"
            lacking = " and ".join(fault.refusal.code for fault in found)
            refusal = Refusal(
                Code.OUTRANKED, f"{lacking} on {slot} after workloads of higher rank", "room for this one"
            )
            return (Fault(Order.MEMORY, refusal, physical(f"raise its priority above {self.intent.priority}")),)
        return found

    def _short(self, option: Option, require: Requirements, books: Books) -> tuple[Fault, ...]:
        admissible = admissible_bytes(option.device, option.state, books.memory.get(option.slot, NOTHING))
        busy, booked = busy_share(self.scope, self.intent, option, require.replicas), books.busy.get(option.slot, 0.0)
        found = (
            memory_fault(option, memory_needed(option), admissible),
            utilisation_fault(option, busy, booked, UTILISATION_MOST, require.replicas),
        )
        return tuple(fault for fault in found if fault is not None)

    def _quota(self, would_hold: Held) -> Fault | None:
        """The quota that the tenant would exceed."""
        tenant = self.intent.key.tenant
        quota = self.scope.inputs.quotas.get(tenant)
        if quota is None:
            return None
        if quota.replicas is not None and would_hold.replicas > quota.replicas:
            found = f"{tenant} would have {would_hold.replicas} replicas"
            remedy = f"quota: {{replicas: {would_hold.replicas}}} of tenant {tenant}"
            return Fault(Order.QUOTA, Refusal(Code.QUOTA, found, f"at most {quota.replicas}"), physical(remedy))
        if quota.memory is not None and would_hold.memory > quota.memory:
            found = f"{tenant} would have {show_bytes(would_hold.memory)}"
            remedy = f"quota: {{memory: {show_bytes(would_hold.memory)}}} of tenant {tenant}"
            refusal = Refusal(Code.QUOTA, found, f"at most {show_bytes(quota.memory)}")
            return Fault(Order.QUOTA, refusal, physical(remedy))
        return None


def memory_needed(option: Option) -> Bytes:
    """What is committed for a new replica: the upper end of the prediction."""
    return Bytes(0 if option.prediction is None else math.ceil(option.prediction.memory_bytes.high))


def spread_allows(option: Option, picks: Sequence[Pick], require: Requirements) -> bool:
    match require.spread:
        case Spread.NONE:
            return True
        case Spread.DEVICE:
            return all(pick.option.slot != option.slot for pick in picks)
        case Spread.NODE:
            return all(pick.option.slot.node != option.slot.node for pick in picks)


def is_apart(option: Option, picks: Sequence[Pick]) -> bool:
    """On a node with none of these: a standby does not fall with what it stands by for."""
    return all(pick.option.slot.node != option.slot.node for pick in picks)


def _no_standby(census: Counter[Code]) -> Refusal:
    found = ", ".join(f"{code} x {count}" for code, count in sorted(census.items()))
    asked = "a node without an active replica, and room there"
    return Refusal(Code.STANDBY_SHORT, found, asked, "add a node, or free memory")


def _spread_fault(option: Option, require: Requirements) -> Fault:
    taken = option.slot.node if require.spread is Spread.NODE else f"{option.slot.node}/{option.slot.device}"
    refusal = Refusal(Code.SPREAD_CONFLICT, f"{taken} has a replica already", f"spread: {require.spread}")
    other = Spread.DEVICE if require.spread is Spread.NODE else Spread.NONE
    return Fault(Order.SPREAD, refusal, Give(spread=other, distance=CATEGORY))
