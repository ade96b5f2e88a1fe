"""`shoal explain`: why a workload is where it is, or nowhere; what a code means."""

from dataclasses import asdict
from difflib import get_close_matches

import click

from shoal.cli.names import WORKLOAD
from shoal.cli.options import connect, connection, output, tenant
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import rows_of, show
from shoal.cli.render.output import emit, line
from shoal.cli.render.plan import show_delegation, show_explanation
from shoal.types.codes import Code, refuse


@click.command()
@click.argument("workload", type=WORKLOAD, metavar="WORKLOAD|CODE")
@tenant
@connection
@output
def explain(workload: str, tenant: str, context: str, region: str, output: str) -> None:
    """Every candidate with its score terms, the first constraint that excluded it, and the nearest change that fits.

    Of a CODE, as errors and reasons end with: what it means, and what to do. Nobody is asked for that.
    """
    # Names of workloads have small letters alone.
    if workload.isupper():
        _explain_code(workload, output)
        return
    with connect(context, region) as api:
        reply = api.explain(tenant, workload)
        agreement = reply.plan.agreement if output not in ("json", "yaml") else ""
        agreements = rows_of(api, "agreements", agreement, "") if agreement else ()
        steps = api.get("ledger", agreement).ledger if agreement else ()
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        show_explanation(reply, wide=output == "wide")
        if agreement:
            show_delegation(reply, steps)
        if agreements:
            show("agreements", agreements, wide=output == "wide")


def _explain_code(name: str, output: str) -> None:
    """Raises ShoalError(USAGE)."""
    from shoal.types.code_help import CODE_HELP  # all of its texts, which the other way does not read

    found = next((code for code in CODE_HELP if code.name == name), None)
    if found is None:
        near = get_close_matches(name, [code.name for code in Code], 1)
        remedy = f"shoal explain {near[0]}" if near else "docs/reference/codes.md lists them"
        raise refuse(Code.USAGE, f"no code is called {name!r:.80}", "a code as errors and reasons name it", remedy)
    meaning = CODE_HELP[found]
    if output in ("json", "yaml"):
        emit({"code": found.name, **asdict(meaning)}, output)
        return
    line(found.name)
    line(meaning.cause)
    line(meaning.cure)
