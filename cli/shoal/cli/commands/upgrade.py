"""`shoal upgrade`: another version of the agents, or of the coordinators, in waves; see `shoal.cli.rollout`."""

import json
import math
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from shoal.cli import rollout
from shoal.cli.options import connected, connection
from shoal.cli.render.output import emit, line, progress
from shoal.cli.render.resources import reason
from shoal.cli.rollout import Admit, Asked, Drain, Hook, Install, Leaving, Over, Part, Seen, Service, Watch
from shoal.client import Contexts, Region, insisting
from shoal.types.assignment import Phase
from shoal.types.codes import Code, ShoalError
from shoal.v1 import nouns_pb2, operator_pb2

LOOK_S: Final = 0.5
HOOKS_MOST: Final = 256
"""Of a wave, at once: none waits for another's, all are late by the same clock."""
DRAIN_AGAIN_S: Final = 3.0
"""Between drains of a node of which something is left and nothing moves."""
_NOBODY: Final = frozenset({Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER, Code.CANCELLED, Code.DEADLINE_EXCEEDED})
"""How a call ends while the coordinator itself is being changed."""
_FEDERATIONS: Final = frozenset({Code.KIND_UNKNOWN, Code.UNIMPLEMENTED})
"""What a federation's service says, which has no nodes, of them."""
_LOADED: Final = frozenset({Phase.READY, Phase.STAGED})
RECOUNT_S: Final = 3.0
"""After a node's new session: until its counts are those of its front again."""
Key = tuple[str, str, str]
"""Tenant, workload, and the node where requests enter; of another region's that region, whichever gateway they meet."""


class Share(click.ParamType[float]):
    """`10%`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        with suppress(ValueError):
            share = float(str(value).removesuffix("%")) / 100
            if str(value).endswith("%") and 0 <= share <= 1:
                return share
        return self.fail(f"{value!r} is no share, like 10%", param, ctx)


@click.command()
@click.option("--to", "version", required=True, metavar="VERSION", help="As `shoal get nodes -o wide` shows it then.")
@click.option("--component", type=click.Choice(["agent", "coordinator"]), default="agent", show_default=True)
@click.option("--wave", type=Share(), default="10%", show_default=True, help="Of all, at once; the first is one alone.")
@click.option(
    "--exec",
    "command",
    default="",
    metavar="COMMAND",
    help="Installs it: run here, once for each, with {node} (a coordinator's HOST:PORT) and {version} filled in.",
)
@click.option("--hold", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to watch each wave.")
@click.option(
    "--within", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds to be empty, and to be back."
)
@click.option("--max-errors", type=Share(), default="1%", show_default=True, help="Failed requests, beyond before.")
@click.option(
    "--max-slower", type=click.FloatRange(1), default=2.0, show_default=True, help="Of each workload's p95, as factor."
)
@click.option("--in-place", is_flag=True, help="What cannot leave a node is stopped with it.")
@click.option("--dry-run", is_flag=True, help="Only say which waves there would be.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", envvar="SHOAL_OUTPUT")
@connection
def upgrade(
    version: str,
    component: str,
    wave: float,
    command: str,
    hold: float,
    within: float,
    max_errors: float,
    max_slower: float,
    in_place: bool,
    dry_run: bool,
    output: str,
    context: str,
    region: str,
) -> None:
    """Bring every agent (gateways last), or every coordinator, to VERSION: a newer one, or the one before.

    One is changed alone, then a wave at a time. Each node is drained, live; the command installs the version (without
    one you do, when told to); the node comes back, says that it runs it, and may be given work again. After each wave
    it is watched that no more requests fail than before, none got slower, every node is ready and `shoal doctor` finds
    nothing new: otherwise it halts, status 255, and says how to go on and how to go back. The same command again goes
    on where it was. Coordinators go one at a time, the one that leads last; a federation's too, with a context of its
    operator.
    """
    asked = Asked(version, wave if component == "agent" else 0.0, hold, within, max_errors, max_slower, in_place)
    with connected(context, region) as api:
        kept = Contexts().folder / f"upgrade-{api.context.region}.json"
        shell = _Shell(api, component, asked, command, kept, progress(output))
        planned = rollout.waves(shell.look().parts, asked)
        for number, names in enumerate(planned, 1):
            shell.say(f"wave {number} of {len(planned)}: {', '.join(names)}")
        over = Over() if dry_run else shell.run()
    if over.refusal is not None:
        raise ShoalError(over.refusal)
    if output in ("json", "yaml"):
        emit({"version": version, "waves": [list(names) for names in planned], "left": list(over.left)}, output)
    elif not dry_run:
        line(f"{component}s run {version}" + (f", but not {', '.join(over.left)}" if over.left else ""))
    if over.left:
        raise click.exceptions.Exit(1)


class _Shell:
    """Looks, asks the core, and does what it says."""

    def __init__(
        self, api: Region, component: str, asked: Asked, command: str, kept: Path, say: Callable[[str], None]
    ) -> None:
        """kept: names of the nodes that an upgrade from here has cordoned; nobody else's are admitted again."""
        self.say = say
        self._api = api
        self._component = component
        self._asked = asked
        self._command = shlex.split(command)
        self._kept = kept
        self._hooks: dict[str, Future[str]] = {}
        self._cordoned = frozenset[str]()
        """At the last look, by whomever."""
        self._drained: dict[str, float] = {}
        self._leaving: dict[str, Leaving] = {}
        self._unmoved: dict[str, tuple[operator_pb2.UnmovedReplica, ...]] = {}
        """By node, as its last drain said."""
        self._tally = Tally()
        self._pool = ThreadPoolExecutor(HOOKS_MOST, thread_name_prefix="install")

    def run(self) -> Over:
        seen = self.look()
        course, effects = rollout.begun(seen, self._asked, _now())
        with self._pool:
            while True:
                for effect in effects:
                    self._perform(effect)
                if isinstance(course.stage, Over):
                    return course.stage
                time.sleep(LOOK_S)  # noqa: TID251 - a command's own pace
                now = _now()  # one moment for both: a watch that is over is judged with doctor's checks
                due = isinstance(course.stage, Watch) and now >= course.stage.until
                seen = self.look(patient=True, examine=due)
                before = course.stage
                course, effects = rollout.step(course, seen, self._asked, now)
                if isinstance(course.stage, Watch) and course.stage is not before:
                    names = ", ".join(course.stage.wave)
                    self.say(f"{names}: {self._asked.version}, watched for {self._asked.hold_s:g}s")

    # looking

    def look(self, *, patient: bool = False, examine: bool = False) -> Seen:
        """patient: it is no error that nobody leads. examine: with doctor's checks. Raises ShoalError."""
        hooks = {name: _hook(future) for name, future in self._hooks.items()}
        nodes, wrong = tuple[Part, ...](), frozenset[str]()
        service: Service | None = None
        try:
            nodes, service = self._nodes()
            if examine:
                wrong = frozenset(
                    f"{check.name}: {check.refusal.code} {check.refusal.found}"
                    for check in self._api.doctor().checks
                    if not check.ok
                )
        except ShoalError as error:
            if error.code in _FEDERATIONS and self._component == "coordinator":
                service = Service()
            elif error.code in _NOBODY and patient:
                service = None
            else:
                raise
        ready = frozenset(part.name for part in nodes if part.ready)
        parts = nodes if self._component == "agent" else self._coordinators()
        return Seen(parts, ready, service, wrong, dict(self._leaving), hooks)

    def _nodes(self) -> tuple[tuple[Part, ...], Service]:
        workloads = self._api.get("workloads").workloads  # before the epochs, or late counts came with an early one
        placements = self._api.get("placements").placements
        here = [row.node for row in placements]
        loading = [row.node for row in placements if row.observed.phase not in _LOADED]
        views = [view for view in self._api.get("nodes").nodes if not view.revoked]
        parts = tuple(
            Part(
                view.node.name,
                view.node.agent_version,
                view.liveness == "ready" and view.front_ready,
                rank=int(view.node.role == "gateway"),
                replicas=here.count(view.node.name),
                loading=loading.count(view.node.name),
                drains=view.node.role != "gateway",
            )
            for view in views
        )
        self._cordoned = frozenset(view.node.name for view in views if view.cordoned)
        self._follow({name for name in self._drained if name in here})
        epochs = {view.node.name: view.epoch for view in views}
        return parts, self._tally.add(workloads, placements, epochs, _now())

    def _follow(self, full: set[str]) -> None:
        """Of drained nodes that are not empty: what moves, and, where nothing does, a drain again."""
        if not full:
            return
        live = [one for one in self._api.get("migrations").migrations if one.stage not in ("done", "aborted")]
        for name in full:
            moves = [one for one in live if one.source.node == name]
            self._leaving[name] = leaving(moves, self._unmoved[name])
            if not moves and _now() - self._drained[name] > DRAIN_AGAIN_S:
                self._drain(name)

    def _coordinators(self) -> tuple[Part, ...]:
        answers = self._api.coordinators()
        several = any(reply is not None and reply.follows for reply in answers.values())
        return tuple(
            Part(
                address,
                reply.version if reply is not None else "",
                reply is not None,
                rank=int(several and reply is not None and not reply.follows),
                drains=False,
            )
            for address, reply in answers.items()
        )

    # doing

    def _perform(self, effect: rollout.Effect) -> None:
        match effect:
            case Drain(names):
                for name in names:
                    self.say(f"{name}: drained")
                    if name not in self._cordoned:
                        self._keep({*self._ours(), name})
                    self._drain(name)
            case Install(names):
                for name in names:
                    self._drained.pop(name, None)
                    self._install(name)
            case Admit(names):
                for name in sorted(self._ours() & set(names)):
                    insisting(partial(self._api.cordon, name, cordoned=False), _NOBODY)
                    self._keep(self._ours() - {name})
                for name in names:
                    self._drained.pop(name, None)

    def _drain(self, name: str) -> None:
        reply = insisting(lambda: self._api.drain(name), _NOBODY)
        self._unmoved[name] = tuple(reply.unmoved)
        self._leaving[name] = leaving(reply.migrations, reply.unmoved)
        self._drained[name] = _now()

    def _install(self, name: str) -> None:
        if not self._command:
            self.say(f"{name}: install {self._asked.version} there now")
            self._hooks[name] = Future()
            self._hooks[name].set_result("")
            return
        filled = [each.replace("{node}", name).replace("{version}", self._asked.version) for each in self._command]
        self.say(f"{name}: {shlex.join(filled)}")
        self._hooks[name] = self._pool.submit(_executed, filled, self._asked.within_s)

    def _ours(self) -> set[str]:
        with suppress(FileNotFoundError, ValueError):
            return set(json.loads(self._kept.read_text())["cordoned"])
        return set()

    def _keep(self, names: Iterable[str]) -> None:
        if kept := sorted(names):
            self._kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._kept.write_text(json.dumps({"cordoned": kept}))
        else:
            self._kept.unlink(missing_ok=True)


def leaving(
    moves: Sequence[operator_pb2.MigrationView], unmoved: Iterable[operator_pb2.UnmovedReplica]
) -> Leaving:  # fmt: skip
    """Of one node. moves: that are not over; one that is planned and has no place, nor waits for its turn, is none yet.
    unmoved: what its drain could begin no move of."""
    placeless = [one for one in moves if one.stage == "planned" and not _passes(one.reason)]
    stays = (
        *((one.source.assignment, one.reason) for one in placeless),
        *((each.assignment, each.reason) for each in unmoved if not _passes(each.reason)),
    )
    return Leaving(len(moves) - len(placeless), tuple(f"{name} stays: {reason(why)}" for name, why in stays))


def _passes(why: nouns_pb2.Refusal) -> bool:
    """It waits for what comes by itself."""
    return why.code.startswith("WAITING_FOR_")


class Tally:
    """Adds up what fronts count: one that starts counts anew, and a node that calls again tells late what it has."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[int, int]] = {}
        self._epochs: Mapping[str, int] = {}
        self._again_at: dict[str, float] = {}
        """By node: in a large fleet some node always calls again, and the others count meanwhile."""
        self._requests = self._failed = 0

    def add(
        self,
        workloads: Iterable[operator_pb2.WorkloadView],
        placements: Iterable[operator_pb2.PlacementView],
        epochs: Mapping[str, int],
        now: float,
    ) -> Service:
        """epochs: of the nodes' sessions, by node."""
        counts: dict[Key, tuple[int, int]] = {}
        for view in workloads:
            for each in view.ingress:
                key = (view.workload.tenant, view.workload.name, each.origin)
                counts[key] = (each.requests, each.refused + each.lost)
        anew = (node for node, epoch in epochs.items() if self._epochs.get(node) != epoch)
        self._again_at.update((node, now + RECOUNT_S) for node in anew)
        self._epochs = epochs
        all_at = max(self._again_at.values(), default=math.inf)
        for key, (requests, failed) in counts.items():
            if now >= self._again_at.get(key[-1], all_at):
                before = self._last.get(key, (0, 0))
                self._requests += max(0, requests - before[0])
                self._failed += max(0, failed - before[1])
        self._last = counts
        return Service(self._requests, self._failed, _slowest(placements))


def _slowest(placements: Iterable[operator_pb2.PlacementView]) -> Mapping[str, float]:
    """p95 of the slowest replica in service, by workload. Seconds."""
    found: dict[str, float] = {}
    for row in placements:
        if row.routed and row.observed.phase == "ready":
            key = f"{row.assignment.workload.tenant}/{row.assignment.workload.name}"
            p95_s = max((each.latency_p95_s for each in row.observed.served if each.requests), default=0.0)
            found[key] = max(found.get(key, 0.0), p95_s)
    return found


def _executed(command: list[str], within_s: float) -> str:
    """Why it failed; empty: it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=within_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"status {done.returncode}: {said[-1] if said else 'it said nothing'}" if done.returncode else ""


def _hook(future: Future[str]) -> Hook:
    return Hook(ended=True, failure=future.result()) if future.done() else Hook()


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - a command's own deadlines
