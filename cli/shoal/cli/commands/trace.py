"""`shoal trace`: where the time of one request, migration or negotiation went."""

from collections.abc import Iterable

import click

from shoal.cli.options import connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, note
from shoal.cli.render.waterfall import show_trace
from shoal.client import Contexts
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.trace import Span
from shoal.v1 import nouns_pb2, operator_pb2
from shoal.wire.nouns import from_wire

_REGION_ATTRIBUTES = ("shoal.to.region", "shoal.from.region")
"""Span attributes that name the region where the trace continues."""


@click.command()
@click.argument("name", metavar="ID")
@connection
@output
def trace(name: str, context: str, region: str, output: str) -> None:
    """The spans of one request, migration or negotiation as a waterfall.

    ID is of a trace (32 hexadecimal digits: of `shoal infer --trace`, a log line's `trace_id`, a client's own), of a
    migration, or of a negotiation or its agreement. Fronts keep the spans of the newest traced requests; migrations and
    negotiations are told from what is stored of them. Where a trace goes on in another region, that one is asked too if
    there is a context for it. Times are each machine's own.
    """
    with connect(context, region) as api:
        first, asked = api.trace(name), {api.context.region}
    found, silent = list(first.spans), list(first.silent)
    while others := sorted(_linked_regions(found) - asked):
        asked.update(others)
        for other in others:
            reply = _trace_in(other, first.trace)
            found += reply.spans
            silent += reply.silent
    if silent:
        note(f"no answer from {', '.join(sorted(silent))}: their spans are not among these")
    if not found:
        raise refuse(
            Code.NOT_FOUND, f"no spans of trace {name:.80}", "a request that was traced not long ago",
            "`shoal infer --trace`; see docs/guides/traces.md for which are traced, and for how long they are kept",
        )  # fmt: skip
    if output in ("json", "yaml"):
        emit([as_data(each) for each in found], output)
    else:
        show_trace([from_wire(Span, each) for each in found], wide=output == "wide")


def _linked_regions(spans: Iterable[nouns_pb2.Span]) -> set[str]:
    return {region for span in spans for key in _REGION_ATTRIBUTES if (region := span.attributes.get(key, ""))}


def _trace_in(region: str, trace_id: str) -> operator_pb2.TraceReply:
    """Another region's spans of the trace; none, with the reason, if it does not answer."""
    known = [each.name for each in Contexts().all() if each.region == region]
    if not known:
        note(f"it goes on in {region}, of which there is no context: what was there is not among these")
        return operator_pb2.TraceReply()
    try:
        with connect(known[0], region) as api:
            return api.trace(trace_id)
    except ShoalError as error:
        note(f"{region}: {error}")
        return operator_pb2.TraceReply()
