"""`shoal upgrade`: a new version of agents or coordinators, in waves; see `shoal.cli.rollout`."""

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
from typing import Final

import click

from shoal.cli import rollout
from shoal.cli.options import SHARE, connect, connection
from shoal.cli.render.output import emit, line, progress
from shoal.cli.render.resources import reason
from shoal.cli.rollout import (
    AdmitNodes,
    DrainNodes,
    DrainProgress,
    FinishedStage,
    InstallHook,
    InstallVersion,
    RolloutObservation,
    RolloutOptions,
    RolloutPart,
    ServiceCounts,
    WatchStage,
)
from shoal.client import Contexts, RegionClient, retry_while
from shoal.types.assignment import Phase
from shoal.types.codes import Code, ShoalError
from shoal.v1 import nouns_pb2, operator_pb2

POLL_S: Final = 0.5
MAX_HOOKS: Final = 256
"""Install commands of a wave that run at once: none waits for another, since one deadline holds for all."""
REDRAIN_S: Final = 3.0
"""Seconds between drains of a node that still has replicas, none of which moves."""
_NO_LEADER_CODES: Final = frozenset(
    {Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER, Code.CANCELLED, Code.DEADLINE_EXCEEDED}
)
"""How a call fails while the coordinator itself is being replaced."""
_FEDERATION_CODES: Final = frozenset({Code.KIND_UNKNOWN, Code.UNIMPLEMENTED})
"""How a federation's service, which has no nodes, refuses to list them."""
_LOADED_PHASES: Final = frozenset({Phase.READY, Phase.STAGED})
RECOUNT_S: Final = 3.0
"""Seconds after a node's new session until its counts are its front's again."""
Key = tuple[str, str, str]
"""Tenant, workload, and the node where requests enter. Requests of another region count under that region, whichever
gateway they use."""


@click.command()
@click.option("--to", "version", required=True, metavar="VERSION", help="As `shoal get nodes -o wide` shows it then.")
@click.option("--component", type=click.Choice(["agent", "coordinator"]), default="agent", show_default=True)
@click.option("--wave", type=SHARE, default="10%", show_default=True, help="Of all, at once; the first is one alone.")
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
@click.option("--max-errors", type=SHARE, default="1%", show_default=True, help="Failed requests, beyond before.")
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
    asked = RolloutOptions(
        version, wave if component == "agent" else 0.0, hold, within, max_errors, max_slower, in_place
    )
    with connect(context, region) as api:
        kept = Contexts().folder / f"upgrade-{api.context.region}.json"
        shell = _UpgradeDriver(api, component, asked, command, kept, progress(output))
        planned = rollout.waves(shell.observe().parts, asked)
        for number, names in enumerate(planned, 1):
            shell.say(f"wave {number} of {len(planned)}: {', '.join(names)}")
        over = FinishedStage() if dry_run else shell.run()
    if over.refusal is not None:
        raise ShoalError(over.refusal)
    if output in ("json", "yaml"):
        emit({"version": version, "waves": [list(names) for names in planned], "left": list(over.skipped)}, output)
    elif not dry_run:
        line(f"{component}s run {version}" + (f", but not {', '.join(over.skipped)}" if over.skipped else ""))
    if over.skipped:
        raise click.exceptions.Exit(1)


class _UpgradeDriver:
    """Observes the region, steps the rollout, and performs its effects."""

    def __init__(
        self,
        api: RegionClient,
        component: str,
        asked: RolloutOptions,
        command: str,
        kept: Path,
        say: Callable[[str], None],
    ) -> None:
        """kept: file with the nodes that an upgrade from this machine has cordoned; only those are admitted again."""
        self.say = say
        self._api = api
        self._component = component
        self._options = asked
        self._command = shlex.split(command)
        self._cordon_file = kept
        self._hooks: dict[str, Future[str]] = {}
        self._cordoned_nodes = frozenset[str]()
        """Nodes cordoned by anybody at the last observation."""
        self._drained_at: dict[str, float] = {}
        self._drain_progress: dict[str, DrainProgress] = {}
        self._drain_refusals: dict[str, tuple[operator_pb2.DrainRefusal, ...]] = {}
        """Node -> replicas that its last drain could not move."""
        self._tally = RequestTally()
        self._pool = ThreadPoolExecutor(MAX_HOOKS, thread_name_prefix="install")

    def run(self) -> FinishedStage:
        seen = self.observe()
        course, effects = rollout.begin(seen, self._options, _now())
        with self._pool:
            while True:
                for effect in effects:
                    self._perform(effect)
                if isinstance(course.stage, FinishedStage):
                    return course.stage
                time.sleep(POLL_S)  # noqa: TID251 - a command's own pace
                now = _now()  # one time for both: a watch that ends needs doctor's checks
                due = isinstance(course.stage, WatchStage) and now >= course.stage.until
                seen = self.observe(tolerate_no_leader=True, run_doctor=due)
                before = course.stage
                course, effects = rollout.step(course, seen, self._options, now)
                if isinstance(course.stage, WatchStage) and course.stage is not before:
                    names = ", ".join(course.stage.wave)
                    self.say(f"{names}: {self._options.version}, watched for {self._options.hold_s:g}s")

    # looking

    def observe(self, *, tolerate_no_leader: bool = False, run_doctor: bool = False) -> RolloutObservation:
        """tolerate_no_leader: no error if none leads. run_doctor: include doctor's checks. Raises ShoalError."""
        hooks = {name: _hook_state(future) for name, future in self._hooks.items()}
        nodes, wrong = tuple[RolloutPart, ...](), frozenset[str]()
        service: ServiceCounts | None = None
        try:
            nodes, service = self._nodes()
            if run_doctor:
                wrong = frozenset(
                    f"{check.name}: {check.refusal.code} {check.refusal.found}"
                    for check in self._api.doctor().checks
                    if not check.ok
                )
        except ShoalError as error:
            if error.code in _FEDERATION_CODES and self._component == "coordinator":
                service = ServiceCounts()
            elif error.code in _NO_LEADER_CODES and tolerate_no_leader:
                service = None
            else:
                raise
        ready = frozenset(part.name for part in nodes if part.ready)
        parts = nodes if self._component == "agent" else self._coordinators()
        return RolloutObservation(parts, ready, service, wrong, dict(self._drain_progress), hooks)

    def _nodes(self) -> tuple[tuple[RolloutPart, ...], ServiceCounts]:
        workloads = self._api.get(
            "workloads"
        ).workloads  # before the epochs, so that new counts never come with an old epoch
        placements = self._api.get("placements").placements
        here = [row.node for row in placements]
        loading = [row.node for row in placements if row.observed.phase not in _LOADED_PHASES]
        views = [view for view in self._api.get("nodes").nodes if not view.revoked]
        parts = tuple(
            RolloutPart(
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
        self._cordoned_nodes = frozenset(view.node.name for view in views if view.cordoned)
        self._update_drains({name for name in self._drained_at if name in here})
        epochs = {view.node.name: view.epoch for view in views}
        return parts, self._tally.add(workloads, placements, epochs, _now())

    def _update_drains(self, full: set[str]) -> None:
        """Update what still moves on drained nodes that are not empty; drain a node again if nothing moves."""
        if not full:
            return
        over = ("done", "aborted", "queued")  # what waits in the queue does not move
        live = [one for one in self._api.get("migrations").migrations if one.stage not in over]
        for name in full:
            moves = [one for one in live if one.source.node == name]
            self._drain_progress[name] = drain_progress(moves, self._drain_refusals[name])
            if not moves and _now() - self._drained_at[name] > REDRAIN_S:
                self._drain(name)

    def _coordinators(self) -> tuple[RolloutPart, ...]:
        answers = self._api.coordinators()
        several = any(reply is not None and reply.follows for reply in answers.values())
        return tuple(
            RolloutPart(
                address,
                reply.version if reply is not None else "",
                reply is not None,
                rank=int(several and reply is not None and not reply.follows),
                drains=False,
            )
            for address, reply in answers.items()
        )

    # doing

    def _perform(self, effect: rollout.RolloutEffect) -> None:
        match effect:
            case DrainNodes(names):
                for name in names:
                    self.say(f"{name}: drained")
                    if name not in self._cordoned_nodes:
                        self._save_cordons({*self._own_cordons(), name})
                    self._drain(name)
            case InstallVersion(names):
                for name in names:
                    self._drained_at.pop(name, None)
                    self._install(name)
            case AdmitNodes(names):
                for name in sorted(self._own_cordons() & set(names)):
                    retry_while(partial(self._api.cordon, name, cordoned=False), _NO_LEADER_CODES)
                    self._save_cordons(self._own_cordons() - {name})
                for name in names:
                    self._drained_at.pop(name, None)

    def _drain(self, name: str) -> None:
        reply = retry_while(lambda: self._api.drain(name), _NO_LEADER_CODES)
        self._drain_refusals[name] = tuple(reply.refusals)
        self._drain_progress[name] = drain_progress(reply.migrations, reply.refusals)
        self._drained_at[name] = _now()

    def _install(self, name: str) -> None:
        if not self._command:
            self.say(f"{name}: install {self._options.version} there now")
            self._hooks[name] = Future()
            self._hooks[name].set_result("")
            return
        filled = [each.replace("{node}", name).replace("{version}", self._options.version) for each in self._command]
        self.say(f"{name}: {shlex.join(filled)}")
        self._hooks[name] = self._pool.submit(_run_install, filled, self._options.within_s)

    def _own_cordons(self) -> set[str]:
        with suppress(FileNotFoundError, ValueError):
            return set(json.loads(self._cordon_file.read_text())["cordoned"])
        return set()

    def _save_cordons(self, names: Iterable[str]) -> None:
        if kept := sorted(names):
            self._cordon_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._cordon_file.write_text(json.dumps({"cordoned": kept}))
        else:
            self._cordon_file.unlink(missing_ok=True)


def drain_progress(
    moves: Sequence[operator_pb2.MigrationView], refusals: Iterable[operator_pb2.DrainRefusal]
) -> DrainProgress:  # fmt: skip
    """The progress of one node. moves: migrations that are not over; one that is planned, without a target and not
    queued, does not count yet. refusals: replicas for which the drain could start no migration."""
    placeless = [one for one in moves if one.stage == "planned" and not _is_transient(one.reason)]
    stays = (
        *((one.source.assignment, one.reason) for one in placeless),
        *((each.assignment, each.reason) for each in refusals if not _is_transient(each.reason)),
    )
    return DrainProgress(len(moves) - len(placeless), tuple(f"{name} stays: {reason(why)}" for name, why in stays))


def _is_transient(why: nouns_pb2.Refusal) -> bool:
    """Whether the wait ends by itself."""
    return why.code.startswith("WAITING_FOR_")


class RequestTally:
    """Adds up the fronts' counters. A restarted front counts from zero, and a reconnecting node reports its counts
    late."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[int, int]] = {}
        self._epochs: Mapping[str, int] = {}
        self._counted_from: dict[str, float] = {}
        """Per node, because in a large fleet some node always reconnects, and the others count meanwhile."""
        self._requests = self._failed = 0

    def add(
        self,
        workloads: Iterable[operator_pb2.WorkloadView],
        placements: Iterable[operator_pb2.PlacementView],
        epochs: Mapping[str, int],
        now: float,
    ) -> ServiceCounts:
        """epochs: of the nodes' sessions, by node."""
        counts: dict[Key, tuple[int, int]] = {}
        for view in workloads:
            for each in view.ingress:
                key = (view.workload.tenant, view.workload.name, each.origin)
                counts[key] = (each.requests, each.refused - each.client_faults + each.lost)
        anew = (node for node, epoch in epochs.items() if self._epochs.get(node) != epoch)
        self._counted_from.update((node, now + RECOUNT_S) for node in anew)
        self._epochs = epochs
        all_at = max(self._counted_from.values(), default=math.inf)
        for key, (requests, failed) in counts.items():
            if now >= self._counted_from.get(key[-1], all_at):
                before = self._last.get(key, (0, 0))
                self._requests += max(0, requests - before[0])
                self._failed += max(0, failed - before[1])
        self._last = counts
        return ServiceCounts(self._requests, self._failed, _slowest(placements))


def _slowest(placements: Iterable[operator_pb2.PlacementView]) -> Mapping[str, float]:
    """Workload -> p95 in seconds of its slowest serving replica."""
    found: dict[str, float] = {}
    for row in placements:
        if row.routed and row.observed.phase == "ready":
            key = f"{row.assignment.workload.tenant}/{row.assignment.workload.name}"
            p95_s = max((each.latency_p95_s for each in row.observed.served if each.requests), default=0.0)
            found[key] = max(found.get(key, 0.0), p95_s)
    return found


def _run_install(command: list[str], within_s: float) -> str:
    """Why the command failed; empty if it succeeded."""
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


def _hook_state(future: Future[str]) -> InstallHook:
    return InstallHook(is_done=True, failure=future.result()) if future.done() else InstallHook()


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - a command's own deadlines
