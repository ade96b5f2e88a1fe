"""`shoal apply`: apply documents and wait until they are in effect."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import click

from shoal.cli.documents import Bundle, push_sources, read, waves
from shoal.cli.options import SHARE, connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.migrations import QUEUED, refusal_of
from shoal.cli.render.output import emit, line, note, progress
from shoal.cli.render.plan import refuse_problems, report_plan, show_plan
from shoal.cli.render.progress import status_progress
from shoal.client import RegionClient
from shoal.client.region import retry_while
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.v1 import operator_pb2

Key = tuple[str, str]
"""(tenant, name) of a workload."""


@click.command()
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    help="A YAML file or folder, or - for standard input; repeat.",
)
@click.option(
    "--plan",
    "plan_hash",
    default="",
    metavar="HASH",
    help="Refuse (PLAN_STALE) if a decision of that plan would differ.",
)
@click.option("--no-plan", is_flag=True, help="Do not say what changes: takes a large region less time.")
@click.option(
    "--prune",
    is_flag=True,
    help="Then delete workloads of the tenants in FILES that FILES do not have, and policies that only those used.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing: show the plan, and what --prune would delete.")
@click.option(
    "--wait", is_flag=True, help="Return when the workloads of FILES, and those whose policy FILES change, are ready."
)
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds that --wait waits.")
@click.option(
    "--wave",
    type=SHARE,
    metavar="SHARE",
    help="FILES in waves of this share of those with a workload, as 10%; the first is one alone. The next begins when "
    "the workloads of the last are ready, and none does after a failure. A file without a workload goes with the first "
    "that uses it; a changed policy changes all its workloads then. --timeout holds for each.",
)
@connection
@output
def apply(
    files: tuple[str, ...], plan_hash: str, no_plan: bool, prune: bool, dry_run: bool, wait: bool, timeout_s: float,
    wave: float | None, context: str, region: str, output: str,
) -> None:  # fmt: skip
    """Apply FILES: store them, place what they ask for, and say what changes.

    With --dry-run the exit status is that of `shoal plan`: 0 nothing to do, 1 changes, 255 error.
    """
    if wave is not None and (plan_hash or dry_run):
        found = f"--wave with {'--plan' if plan_hash else '--dry-run'}"
        raise refuse(Code.USAGE, found, "one of them: a plan is of all FILES at once", "leave one out")
    if no_plan and (plan_hash or dry_run or wave is not None):
        found = f"--no-plan with {'--plan' if plan_hash else '--dry-run' if dry_run else '--wave'}"
        raise refuse(Code.USAGE, found, "one of them", "leave one out")
    bundle = read(files)
    refuse_problems(bundle.problems, output)
    with connect(context, region) as api:
        say = progress(output)
        if dry_run:
            plan = api.plan(bundle.documents, push_sources(api, bundle))
            report_plan(plan, output)
            left = surplus(api, bundle.workloads) if prune and not plan.problems else []
            for kind, name, owner in left:
                say(f"- {kind} {f'{owner}/' if owner else ''}{name}, which is not in these files")
            raise click.exceptions.Exit(255 if plan.problems else 1 if plan.changes or left else 0)
        digests = push_sources(api, bundle)
        if wave is not None:
            apply_in_waves(api, bundle, digests, wave, timeout_s, output)
        else:
            reply = api.apply(bundle.documents, digests, plan_hash, with_plan=not no_plan)
            report_apply(api, reply, plan_hash, bundle.workloads, wait, timeout_s, output)
        for kind, name, owner in surplus(api, bundle.workloads) if prune else ():
            api.delete(kind, name, owner)
            say(f"deleted {kind} {name}, which is not in these files")


def apply_in_waves(
    api: RegionClient, bundle: Bundle, digests: Mapping[str, str], share: float, timeout_s: float, output: str
) -> None:
    """Apply a wave of files at a time, and wait for each. Nothing is applied if any file of all has a problem. JSON and
    YAML are one list, of the outcome of each wave that began. Raises what `report_apply` does, with the wave and how to
    go on."""
    plan = api.plan(bundle.documents, digests)
    if plan.problems:
        report_plan(plan, output)
        raise click.exceptions.Exit(255)
    parts = waves(bundle, share)
    replies = list[operator_pb2.ApplyReply]()
    try:
        for number, part in enumerate(parts, 1):
            progress(output)(f"wave {number} of {len(parts)}: {', '.join(name for _, name in part.workloads)}")
            try:
                reply, since = apply_until_answered(api, part.documents, digests)
                replies.append(reply)
                _report_reply(api, reply, "", part.workloads, since, timeout_s, output)
            except ShoalError as error:
                raise _failed_wave(error.refusal, number, parts) from error
    finally:
        if replies and output in ("json", "yaml"):
            emit([as_data(reply) for reply in replies], output)


def _failed_wave(why: Refusal, number: int, parts: Sequence[Bundle]) -> ShoalError:
    """With what was not begun. The same command goes on there: what is in effect already changes nothing, and waits for
    nothing."""
    left = sum(len(part.workloads) for part in parts[number:])
    after = f"the {left} workload{'s' * (left != 1)} of later waves are as they were" if left else "it was the last one"
    remedy = "; ".join(part for part in (why.remedy, "the same command again goes on with what is left") if part)
    return refuse(why.code, f"wave {number} of {len(parts)}, {after}: {why.found}", why.asked, remedy)


def apply_until_answered(
    api: RegionClient, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str]
) -> tuple[operator_pb2.ApplyReply, float]:
    """The outcome, and a time of the region's clock from which on its effects began.

    One that was late may have been carried out. The same documents once more change nothing then, and what they caused
    began before the answer's own time, by as much as passed here since the first attempt.
    """
    began = list[float]()

    def attempt() -> operator_pb2.ApplyReply:
        began.append(time.monotonic())  # noqa: TID251 - a command's own clock
        return api.apply(documents, digests)

    reply = retry_while(attempt, {Code.DEADLINE_EXCEEDED}, api.on_outage)
    before_s = time.monotonic() - began[0] if len(began) > 1 else 0.0  # noqa: TID251
    return reply, reply.plan.computed_at - before_s


def surplus(api: RegionClient, keep: Iterable[Key]) -> list[tuple[str, str, str]]:
    """(kind, name, tenant) of workloads of these tenants that are not to be kept, then of policies that only
    those use."""
    kept = set(keep)
    tenants = {tenant for tenant, _ in kept}
    views = {(view.workload.tenant, view.workload.name): view for view in api.get("workloads").workloads}
    gone = [key for key, view in views.items() if key not in kept and key[0] in tenants and view.state != "deleting"]
    used = {view.policy for key, view in views.items() if key not in gone}
    unused = {views[key].policy for key in gone} - used
    policies = [row.name for row in api.get("policies").documents if row.name in unused]
    return [*(("workload", name, tenant) for tenant, name in gone), *(("policy", name, "") for name in policies)]


def report_apply(
    api: RegionClient, reply: operator_pb2.ApplyReply, plan_hash: str, workloads: Iterable[Key], wait: bool,
    timeout_s: float, output: str,
) -> None:  # fmt: skip
    """Print the outcome of an apply and wait for it. workloads: of the applied documents. Raises ShoalError(PLAN_STALE
    | DEADLINE_EXCEEDED), or with the code of a permanent failure."""
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    _report_reply(api, reply, plan_hash, workloads, reply.plan.computed_at if wait else None, timeout_s, output)


def _report_reply(
    api: RegionClient, reply: operator_pb2.ApplyReply, plan_hash: str, workloads: Iterable[Key], since: float | None,
    timeout_s: float, output: str,
) -> None:  # fmt: skip
    """As `report_apply`, which has printed JSON and YAML. since: when it was applied, to wait for it; None: do not."""
    if output not in ("json", "yaml"):
        show_plan(reply.plan, wide=output == "wide")  # or its problems
    if reply.problems:
        raise click.exceptions.Exit(255)
    if reply.stale:
        for text in reply.stale:
            progress(output)(f"  differs: {text}")
        raise ShoalError(
            Refusal(
                Code.PLAN_STALE,
                f"the plan is now {reply.plan.hash}",
                f"plan {plan_hash}",
                "look at it again: shoal plan",
            )
        )
    if output == "table" and reply.revision:
        line(f"applied, revision {reply.revision}")
    if since is not None:
        asked = workloads_to_await(reply, workloads, lambda: api.poll("workloads").workloads)
        try:
            with status_progress(progress(output)) as say:
                wait_ready(api, asked, timeout_s, since, say)
        except KeyboardInterrupt:
            note("not waited for any longer; what was applied goes on: shoal get workloads")
            raise
        progress(output)("ready")


def workloads_to_await(
    reply: operator_pb2.ApplyReply,
    workloads: Iterable[Key],
    all_workloads: Callable[[], Iterable[operator_pb2.WorkloadView]],
) -> list[Key]:
    """Workloads that an apply waits for: its own, and those that name a policy that it changed. all_workloads: of the
    region, as they are now."""
    policies = {change.name for change in reply.plan.documents if change.kind == "Policy"}
    # Not from the plan, which a large apply does not make.
    users = [each.workload for each in all_workloads() if each.policy in policies] if policies else []
    return list(dict.fromkeys((*workloads, *((each.tenant, each.name) for each in users))))


def wait_ready(
    api: RegionClient, workloads: Sequence[Key], timeout_s: float, since: float, say: Callable[[str, str], None]
) -> None:
    """Return when each workload is ready as its documents ask. since: when those were applied. say: called with each
    wait, (its stable part, all of it).

    Raises ShoalError(DEADLINE_EXCEEDED) naming the reason. If a workload stays without replicas until somebody changes
    something, raises that reason itself. If a migration that began after `since` was aborted and there is no other
    target, raises its reason; the workload then keeps serving as before. Where its node was only not ready for it, the
    region tries again soon, and that is waited for.
    """
    end = time.monotonic() + timeout_s  # noqa: TID251 - a command's own deadline
    while True:
        views = {(v.workload.tenant, v.workload.name): v for v in api.poll("workloads").workloads}
        waiting = [views[key] for key in workloads if key in views and views[key].state != "ready"]
        if not waiting:
            return
        tried = _raise_if_stuck(api, waiting, since)
        first = waiting[0]
        retry = tried.get((first.workload.tenant, first.workload.name), "")
        if time.monotonic() > end:  # noqa: TID251
            remedy = f"shoal explain {first.workload.name}"
            raise refuse(Code.DEADLINE_EXCEEDED, describe_wait(first) + retry, f"ready within {timeout_s:g}s", remedy)
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        say(_stable_part(first) + retry, f"waiting: {describe_wait(first)}{retry}{more}")
        time.sleep(0.1)  # noqa: TID251


def _raise_if_stuck(api: RegionClient, waiting: Sequence[operator_pb2.WorkloadView], since: float) -> Mapping[Key, str]:
    """Raises ShoalError if waiting for one of these is useless. Returns, by workload, what was tried in vain and is
    tried again."""
    stuck = {(v.workload.tenant, v.workload.name): v for v in waiting if v.state == "pending"}
    passing = dict[Key, str]()
    for move in api.poll("migrations").migrations if stuck else ():
        key = (move.workload.tenant, move.workload.name)
        if key not in stuck or move.stage != "aborted":
            continue
        # What ended in the queue somebody else had asked for.
        if move.stages[0].at >= since and move.stages[0].stage != QUEUED:
            why = refusal_of(move).refusal
            if why.code in _PASSING:
                passing[key] = f"; {why.found} ({why.code}): it serves on as it was, and {move.id} is tried again"
                continue
            raise refuse(
                why.code, f"{why.found}; {move.workload.name} serves on as it was", why.asked,
                f"see `shoal describe migration {move.id}`",
            )  # fmt: skip
    for view in stuck.values():
        if view.final:
            found = f"{view.workload.tenant}/{view.workload.name}: {view.reason.found}"
            remedy = view.reason.remedy or f"shoal explain {view.workload.name}"
            raise refuse(Code(view.reason.code), found, view.reason.asked, remedy)
    return passing


_PASSING: Final = frozenset({Code.NODE_NOT_READY, Code.NODE_SUSPECT})
"""Why a move ended that is tried again as soon as its node answers in time."""


def _stable_part(view: operator_pb2.WorkloadView) -> str:
    """The part of a wait that stays the same between polls; the figures in its reason change."""
    return f"{view.workload.tenant}/{view.workload.name} {view.state} {view.reason.code} {view.ready}"


def describe_wait(view: operator_pb2.WorkloadView) -> str:
    reason = " ".join(part for part in (view.reason.code, view.reason.found) if part)
    more = max(0, view.ready - view.wanted)  # while one is replaced
    ready = f"{view.ready - more} of {view.wanted} ready" + (f" and {more} more" if more else "")
    said = f"{view.workload.tenant}/{view.workload.name} is {view.state}, {ready}"
    return f"{said}: {reason}" if reason else said
