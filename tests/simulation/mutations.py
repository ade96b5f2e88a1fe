"""Planted bugs: each is one small edit of the code under test, applied at run time and taken back.

A mutation edits the source text of one function, so that it says exactly what is wrong; when the text is not there any
more, planting it fails loudly and the mutation must be brought up to date. All who hold the function get the edit: its
code object is replaced, not its name.
"""

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType

from shoal.agent import supervisor
from shoal.agent.core import link_session, route_tables, routing
from shoal.agent.core.assignment import machine
from shoal.coordinator import uncancelled
from shoal.coordinator.controllers.federation import bidder, origin
from shoal.coordinator.controllers.fleet import controller
from shoal.coordinator.controllers.log import region_clock
from shoal.coordinator.controllers.workloads import migrations, moves_api, step
from shoal.coordinator.core.migration import effects
from shoal.coordinator.core.negotiation import hold, trade_transitions
from shoal.coordinator.core.placement import contention
from shoal.coordinator.core.workloads import failures, reconcile
from shoal.simulator.parts import storage
from shoal.simulator.scenarios import matrix, negotiation
from shoal.types import backoff

REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class Mutation:
    """bug: as the fault catalogue (part D) names it. edits: (text, what it becomes), each found exactly once. scenario:
    in which it must be caught."""

    name: str
    bug: str
    function: Callable[..., object]
    edits: tuple[tuple[str, str], ...]
    scenario: str = "storm"

    @contextmanager
    def plant(self) -> Iterator[None]:
        function = self.function
        assert isinstance(function, FunctionType)
        kept = function.__code__
        function.__code__ = self._mutate(function).__code__
        try:
            yield
        finally:
            function.__code__ = kept

    def _mutate(self, function: FunctionType) -> FunctionType:
        text = textwrap.dedent(inspect.getsource(function))
        for old, new in self.edits:
            if text.count(old) != 1:
                raise LookupError(
                    f"{self.name}: {old!r} is in {function.__qualname__} {text.count(old)} times, not once"
                )
            text = text.replace(old, new)
        names: dict[str, object] = {}
        exec(compile(text, f"<mutation {self.name}>", "exec"), function.__globals__, names)
        (mutated,) = names.values()
        assert isinstance(mutated, FunctionType)
        if unknown := sorted(_global_names(mutated.__code__) - function.__globals__.keys() - vars(builtins).keys()):
            raise LookupError(f"{self.name}: {', '.join(unknown)} would be a NameError, which is no planted bug")
        return mutated


def _global_names(code: CodeType) -> set[str]:
    """Globals that the code and the functions in it read."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return names.union(*(_global_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _send_first(when: str) -> tuple[str, str]:
    """An edit of the region's step that sends its desired sets before it commits them. `when` is of its keys."""
    run = "            await self.transitions.run_beside(self._begin_step, self._decide_beside)\n"
    return (
        run,
        "            early = self._begin_step()()\n"
        "            puts = early.writes.puts if early.writes is not None else {}\n"
        f"            for node in [key.removeprefix(DESIRED) for key in puts if key.startswith(DESIRED) and {when}]:\n"
        "                await self._sender._links.send(node, codec.load(DesiredSet, puts[DESIRED + node]))\n"
        + run.replace("self._begin_step", "lambda: lambda: early"),
    )


MUTATIONS = (
    Mutation(
        "agent-acts-before-persisting",
        "persist after acting",
        supervisor.Supervisor._save_forever,
        (
            (
                "await self._journal.save(offered)\n",
                "self._desired = offered; self._reconcile_due.set(); await self._journal.save(offered)\n",
            ),
        ),
    ),
    Mutation(
        "coordinator-sends-before-persisting",
        "persist after acting",
        step.WorkloadsController.step,
        (_send_first("True"),),
    ),
    Mutation(
        "store-acknowledges-before-flush",
        "acknowledge before flush",
        storage.SimStore._write,
        (("    await self._disk.flush(self._process, _LOG)\n", ""),),
    ),
    Mutation(
        "agent-takes-any-generation",
        "no term check",
        link_session._evaluate_same_history,
        (("version.generation < known.generation", "False"), ("version.term < known.term", "False")),
    ),
    Mutation(
        "empty-list-is-healthy",
        "empty list counts as healthy",
        reconcile._Step._is_free,
        (("full = plan.placed >= plan.wanted > 0", "full = True"),),
    ),
    Mutation(
        "poison-by-node",
        "poison counted per node",
        failures.poisonings,
        (("if each.count >= POISON_AFTER", "if False"),),
    ),
    Mutation(
        "backoff-without-jitter",
        "back-off without jitter",
        backoff.delay,
        (("(1.0 - jitter + jitter * share)", "(1.0 - jitter)"),),
    ),
    Mutation(
        "agent-chooses-epoch",
        "epoch chosen by the agent",
        controller.FleetController.on_hello,
        (("epoch = (known.epoch if known is not None else 0) + 1", "epoch = int(hello.nonce[:6], 16) + 1"),),
    ),
    Mutation(
        "drain-closes-first",
        "drain that closes first",
        machine._drain,
        (
            (
                "return draining, (AwaitIdle(), WakeAt(until))",
                "return Gone(state.assignment, state.record, now), (StopWorker(),)",
            ),
        ),
    ),
    Mutation(
        "quota-read-once",
        "quota read then written",
        contention.ContentionCheck.capacity_faults,
        (("usage = allocations.usage(", "usage = self._allocations.usage("),),
    ),
    Mutation(
        "hang-up-cuts-a-commit-from-its-memory",
        "a caller that hangs up cancels its handler (b6ca7d8)",
        uncancelled.run_to_completion,
        (("await asyncio.shield(running)", "await running"),),
    ),
    Mutation(
        "award-not-idempotent",
        "award not idempotent",
        hold._step_granted,
        (
            (
                "return state, (_repeat_grant(state, award, now, terms),)",
                "return replace(state, until=_lease_end(now, terms)), "
                '(LedgerTransition("granted"), LeaseAnswer(terms.lease_s))',
            ),
        ),
        negotiation.NAME,
    ),
    Mutation(
        "hold-without-expiry",
        "hold without expiry",
        bidder.Bidder._hold,
        (
            ("Elapsed(self._clock.now() + self._terms.hold_s)", "Elapsed(self._clock.now() + 1e6)"),
            ("return self._repeat_offer(held, asked)", "return held.offer"),
        ),
        negotiation.NAME,
    ),
    Mutation(
        "lease-without-end",
        "agreement held by one side only",
        hold.step,
        (("case GrantedBid():\n            if now >= state.until:", "case GrantedBid():\n            if False:"),),
        negotiation.NAME,
    ),
    Mutation(
        "next-award-before-the-last-is-known",
        "double award",
        trade_transitions.withdraw,
        (
            (
                "return TradeStep(replace(trade, phase=after), (new_release(phase.offer, origin),))",
                "return TradeStep(with_pause(trade, now, Refusal(code)), (new_release(phase.offer, origin),))",
            ),
        ),
        negotiation.NAME,
    ),
    Mutation(
        "award-sent-before-persisting",
        "persist after acting",
        origin.OriginController._handle,
        (
            (
                "        try:\n            effects = await self._runner.run(",
                "        for effect in self._step(key, event).effects:\n"
                "            self._calls.start(self._calls.perform(key, effect))\n"
                "        try:\n            effects = await self._runner.run(",
            ),
        ),
        negotiation.NAME,
    ),
    Mutation(
        "mover-sends-before-persisting",
        "persist after acting (in the mover)",
        step.WorkloadsController.step,
        (_send_first("any(each.startswith('moves/') for each in puts)"),),
        matrix.NAME,
    ),
    Mutation(
        "move-not-stored-with-its-step",
        "persist after acting (in the mover)",
        step.WorkloadsController._step,
        ((", **written.puts}", "}"),),
        matrix.NAME,
    ),
    Mutation(
        "source-goes-while-target-loads",
        "old replica removed on target `loading`",
        effects.move_of,
        (
            (
                "goes, target, gap=migration.gap, staged=staged)",
                "goes, target, gap=migration.gap, staged=staged, leaving=source)",
            ),
        ),
        matrix.NAME,
    ),
    Mutation(
        "verification-skipped-after-a-restart",
        "verification skipped after a restart",
        migrations.MigrationRepository.start,
        (
            (
                "{each.id: each for each in stored}",
                "{each.id: _replace(each, rule=_replace(each.rule, against=type(each.rule.against)('none'))) "
                "for each in stored for _replace in (__import__('dataclasses').replace,)}",
            ),
        ),
        matrix.NAME,
    ),
    Mutation(
        "clock-loses-its-floor",
        "elapsed time of a region begins anew with its machine",
        region_clock.RegionClock.resume,
        (("missing = floor - self.now()", "missing = 0.0 * floor"),),
        negotiation.NAME,
    ),
    Mutation(
        "weight-moved-before-its-step",
        "weight moved before persist",
        effects.move_of,
        (("share=migration.rule.steps[step]", "share=min(1.0, 2 * migration.rule.steps[step])"),),
        matrix.NAME,
    ),
    Mutation(
        "move-drains-by-closing",
        "drain that closes first (in the mover)",
        machine._drain,
        (
            (
                "return draining, (AwaitIdle(), WakeAt(until))",
                "return Gone(state.assignment, state.record, now), (StopWorker(),)",
            ),
        ),
        matrix.NAME,
    ),
    Mutation(
        "way-back-takes-the-source",
        "rollback removes the replica that serves",
        effects.move_of,
        (("source, refusal, target, leaving=target, drain_s", "source, refusal, target, leaving=source, drain_s"),),
        matrix.NAME,
    ),
    Mutation(
        "a-replica-moves-twice",
        "two moves of one replica, when the first one's answer was lost",
        moves_api.MovesController.migrate,
        (
            ("lambda: self._look(key, aim, replica)", "lambda: Look(lambda: None, lambda _: False)"),
            (
                "self._begin(key, aim, actor, replica)",
                "self.begin(key, aim, actor, next((node, one) "
                "for node, desired in sorted(self._workloads.desired.items()) "
                "for one in desired.assignments if one.workload == key and not (one.draining or one.standby)))",
            ),
        ),
        matrix.NAME,
    ),
    Mutation(
        "ejected-replica-is-never-tried-again",
        "a suspect endpoint is never chosen again",
        routing._may_take,
        (("return now >= health.ejected_until and health.outstanding == 0", "return False"),),
        REQUESTS,
    ),
    Mutation(
        "last-replica-is-ejected",
        "ejects the last endpoint",
        routing.choose,
        (
            (
                "if endpoint.assignment not in tried]",
                "if endpoint.assignment not in tried and _may_take(health.get(endpoint.assignment, HEALTHY), now)]",
            ),
        ),
        REQUESTS,
    ),
    Mutation(
        "draining-replica-gets-requests",
        "a draining endpoint gets new requests",
        routing._open_endpoints,
        (("endpoint.assignment in here", "True"),),
        REQUESTS,
    ),
    Mutation(
        "failure-ejects-nobody",
        "a failed endpoint is chosen at once",
        routing.record_failure,
        (("ejected_until=Elapsed(until))", "ejected_until=None)"),),
        REQUESTS,
    ),
    Mutation(
        "failed-request-is-not-retried",
        "no retry at another endpoint",
        routing.decide_retry,
        (("return RetryDecision.RETRY", "return RetryDecision.RETURN_ERROR"),),
        REQUESTS,
    ),
    Mutation(
        "crashing-request-is-retried-for-ever",
        "no limit on the workers that a request ends",
        routing.decide_retry,
        (("return RetryDecision.BLOCK", "return RetryDecision.RETRY"),),
        REQUESTS,
    ),
    Mutation(
        "front-lets-everybody-in",
        "no limit on requests in flight",
        routing.admit,
        (("if load.workload >= room:", "if False:"),),
        REQUESTS,
    ),
    Mutation(
        "idle-replica-is-refused",
        "an old estimate refuses what an idle endpoint could answer",
        routing._expected_wait,
        (("health.outstanding == 0 or ", ""),),
        REQUESTS,
    ),
    Mutation(
        "forwards-go-round",
        "a forwarded request is forwarded again",
        route_tables._forwarded_routes,
        (("for each in route.endpoints if each.region]", "for each in route.endpoints]"),),
        REQUESTS,
    ),
)
