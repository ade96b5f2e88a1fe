"""`shoal doctor`: checks by component, each failure with the command that fixes it."""

from collections.abc import Iterator, Mapping

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.columns import Column
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line, table
from shoal.cli.render.resources import full_reason
from shoal.cli.render.styles import state
from shoal.types.codes import Code
from shoal.v1 import nouns_pb2, operator_pb2
from shoal.v1.operator_pb2 import Check


@click.command()
@click.argument("component", type=click.Choice(["all", "region", "agent", "federation"]), default="all")
@connection
@output
def doctor(component: str, context: str, region: str, output: str) -> None:
    """Check the region: the invariants on its live state, its store, identity, nodes, the federation that it is in.

    Status 1 when a check fails."""
    with connect(context, region) as api:
        checks = [
            check
            for check in (*coordinators(api.coordinators()), *api.doctor().checks)
            if component in ("all", check.component)
        ]
    failed = [check for check in checks if not check.ok]
    if output in ("json", "yaml"):
        emit([as_data(check) for check in checks], output)
    else:
        table(
            ["", Column("COMPONENT", rank=2), Column("CHECK", least=24), Column("CODE", rank=1)],
            [[state("ok" if each.ok else "FAIL"), each.component, each.name, each.refusal.code] for each in checks],
            wide=output == "wide",
        )
        for each in failed:
            line(f"{each.name}: {full_reason(each.refusal)}", "red")
        line(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise click.exceptions.Exit(1)


def coordinators(answers: Mapping[str, operator_pb2.WhoAmIReply | None]) -> Iterator[Check]:
    """Check which coordinator leads, which could take over, and whether all run one version. answers: by address, as
    `RegionClient.coordinators` returns them."""
    if len(answers) == 1:
        return
    for address, answer in answers.items():
        if answer is None:
            found, remedy = f"{address} does not answer", "start it; the others serve meanwhile"
            refusal = nouns_pb2.Refusal(code=Code.COORDINATOR_UNREACHABLE, found=found, remedy=remedy)
            yield Check(component="region", name=f"coordinator {address}", refusal=refusal)
        else:
            does = "follows" if answer.follows else "leads" if answer.history else "serves"
            yield Check(component="region", name=f"coordinator {address} {does}", ok=True)
    versions = sorted({answer.version for answer in answers.values() if answer is not None})
    if len(versions) > 1:
        found = f"{', '.join(versions)}: an older one that leads drops what it does not know of records that it writes"
        remedy = "shoal upgrade --component coordinator --to VERSION"
        refusal = nouns_pb2.Refusal(code=Code.CONFLICT, found=found, remedy=remedy)
        yield Check(component="region", name="the coordinators are of one version", refusal=refusal)
