"""`shoal version`: of this command, and of the region if it answers."""

from importlib.metadata import version as version_of

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.output import emit, line, note
from shoal.host.compiled import is_compiled
from shoal.types.codes import Code, Refusal, ShoalError


@click.command()
@connection
@output
def version(context: str, region: str, output: str) -> None:
    """The version of this command, whether its transport is compiled, and the versions of the region in use where it
    answers."""
    client = version_of("shoal-orchestrator")
    versions: dict[str, str] = {}
    nodes: dict[str, str] = {}
    name, refusal = "", None
    try:
        with connect(context, region) as api:
            name = api.context.region
            versions = {
                address: reply.version if reply is not None else "" for address, reply in api.coordinators().items()
            }
            if any(versions.values()):
                nodes = {row.node.name: row.node.agent_version for row in api.get("nodes").nodes}
    except ShoalError as error:
        if context or region or error.code is not Code.CONTEXT_UNKNOWN:
            refusal = error.refusal
    if output in ("json", "yaml"):
        emit(_data(client, name, versions, nodes, refusal), output)
        return
    line(f"shoal        {client}" + ("  transport compiled" if is_compiled() else ""))
    if versions:
        line(f"coordinators {_count_versions(versions)}  region {name}")
    if nodes:
        line(f"nodes        {_count_versions(nodes)}")
    if refusal is not None:
        note(f"region       {refusal}")


def _data(
    client: str, region: str, coordinators: dict[str, str], nodes: dict[str, str], refusal: Refusal | None
) -> dict[str, object]:
    found: dict[str, object] = {"client": client, "compiled": is_compiled(), "region": None}
    if coordinators:
        found["region"] = {"name": region, "coordinators": coordinators, "nodes": nodes}
    if refusal is not None:
        found["refusal"] = {"code": str(refusal.code), "found": refusal.found}
    return found


def _count_versions(versions: dict[str, str]) -> str:
    """`0.3.0`, or if parts differ `0.3.0 (2 of 3), 0.2.0 (1 of 3)`; parts that do not answer are counted too."""
    kinds = [one or "no answer" for one in versions.values()]
    distinct = dict.fromkeys(sorted(kinds, key=lambda one: (-kinds.count(one), one)))
    if len(distinct) == 1:
        return next(iter(distinct))
    return ", ".join(f"{one} ({kinds.count(one)} of {len(kinds)})" for one in distinct)
