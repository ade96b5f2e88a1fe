"""`shoal infer`: one request through the gateway."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import numpy as np

from shoal.cli.arrays import Array, RequestInputs, match_inputs, read_inputs, save_outputs, to_json_value
from shoal.cli.names import WORKLOAD
from shoal.cli.options import connection, output, select_context, tenant
from shoal.cli.render.columns import Column
from shoal.cli.render.output import emit, note, table
from shoal.client import Context, InferenceClient, RegionClient
from shoal.client.tensors import BF16
from shoal.types.codes import Code, refuse
from shoal.types.trace import TraceParent

_MAX_ID_DIGITS: Final = 19
"""A number with at most this many digits fits the protocol's int64."""


@click.command()
@click.argument("workload", type=WORKLOAD)
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help=".npz (one array an input), .npy (the only input), or .json (the protocol's request).",
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--gateway", default="", metavar="HOST:PORT", help="Data port of a gateway. [default: the region's]")
@click.option("--trace", "traced", is_flag=True, help="Have its spans kept, for `shoal trace`; as an operator.")
@click.option("--sequence", default="", metavar="ID", help="Of a workload with sessions: a step of this one.")
@click.option("--start", is_flag=True, help="The first step of the sequence.")
@click.option("--end", is_flag=True, help="Its last step.")
@tenant
@connection
@output
def infer(
    workload: str,
    source: Path,
    save: Path | None,
    gateway: str,
    traced: bool,
    sequence: str,
    start: bool,
    end: bool,
    tenant: str,
    context: str,
    region: str,
    output: str,
) -> None:
    """Send one request for WORKLOAD through the gateway and show the answer.

    Strings are read from arrays of numpy's str or bytes and saved as such; nothing is pickled. BF16 is read from uint16
    (its bits), from bfloat16 of ml_dtypes, or from floats that it holds exactly, and saved as float32.
    """
    target = replace(select_context(context, region), tenant=tenant)
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8), sampled=True) if traced else None
    given = read_inputs(source)
    parameters = dict(given.parameters)
    if sequence:
        parameters |= {"sequence_id": _parse_sequence_id(sequence), "sequence_start": start, "sequence_end": end}
    elif start or end:
        raise refuse(
            Code.INVALID_ARGUMENT, "--start or --end alone", "the sequence that begins or ends", "--sequence ID"
        )
    with InferenceClient(target, gateway or gateway_of(target)) as client:
        inputs, datatypes = _inputs(given, client, workload)
        if parent is not None:
            note(f"its spans: shoal trace {parent.trace}")
        answer = client.infer(
            workload, inputs, traceparent=str(parent or ""), datatypes=datatypes, parameters=parameters
        )
    if save is not None:
        save_outputs(save, answer.outputs)
    if output in ("json", "yaml"):
        emit({name: to_json_value(value) for name, value in answer.outputs.items()}, output)
        return
    table(
        [Column("OUTPUT", least=16), Column("TYPE", rank=3), Column("SHAPE", rank=1), Column("VALUES", 2, least=16)],
        [
            [name, _dtype_name(answer.datatypes.get(name, ""), value), "x".join(map(str, value.shape)), preview(value)]
            for name, value in answer.outputs.items()
        ],
        wide=output == "wide",
    )


def _dtype_name(datatype: str, value: Array) -> str:
    """numpy's name of the datatype, if it has one."""
    return datatype if datatype in (BF16, "BYTES") else str(value.dtype)


def preview(value: Array) -> str:
    """The first elements, in one line."""
    first = value.ravel()[:6]
    return (
        str(to_json_value(first))
        if first.dtype == np.object_
        else np.array2string(first, precision=5, max_line_width=200)
    )


def gateway_of(context: Context) -> str:
    """The context's gateway, else the first that the coordinator lists."""
    if context.gateway:
        return context.gateway
    with RegionClient(context) as api:
        found = api.who_am_i().gateways
    if not found:
        raise refuse(Code.NOT_FOUND, "the region has no gateway that is ready", "one", "shoal-agent run --role gateway")
    return found[0]


def _inputs(given: RequestInputs, client: InferenceClient, workload: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays and datatypes by input. Asks for the model's metadata only if the file does not state everything."""
    if given.datatypes:
        return given.arrays, given.datatypes
    return match_inputs(given, workload, client.metadata(workload))


def _parse_sequence_id(text: str) -> str | int:
    """A sequence id: an int if the text is a number, since the protocol has both types."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _MAX_ID_DIGITS else text
