"""`shoal infer`: one request through the gateway."""

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from shoal.cli.options import chosen, connection, output, tenant
from shoal.cli.render.output import emit, note, table
from shoal.client import Context, Inference, Region
from shoal.client.inference import DTYPES
from shoal.types.codes import Code, refuse
from shoal.types.trace import TraceParent


@click.command()
@click.argument("workload")
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help=".npz (one array an input), .npy (the only input), or .json (the protocol's request).",
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--gateway", default="", metavar="HOST:PORT", help="REST address. [default: the region's]")
@click.option("--trace", "traced", is_flag=True, help="Have its spans kept, for `shoal trace`; as an operator.")
@tenant
@connection
@output
def infer(
    workload: str,
    source: Path,
    save: Path | None,
    gateway: str,
    traced: bool,
    tenant: str,
    context: str,
    region: str,
    output: str,
) -> None:
    """Send one request for WORKLOAD through the gateway and show the answer."""
    target = replace(chosen(context, region), tenant=tenant)
    parent = TraceParent(secrets.token_hex(16), secrets.token_hex(8), sampled=True) if traced else None
    with Inference(target, gateway or gateway_of(target)) as client:
        inputs = _read(source, client, workload)
        if parent is not None:
            note(f"its spans: shoal trace {parent.trace}")
        answer = client.infer(workload, inputs, traceparent=str(parent or ""))
    if save is not None:
        np.savez(save, allow_pickle=False, **answer.outputs)
    if output in ("json", "yaml"):
        emit({name: value.tolist() for name, value in answer.outputs.items()}, output)
        return
    table(
        ["OUTPUT", "TYPE", "SHAPE", "VALUES"],
        [
            [name, str(value.dtype), "x".join(map(str, value.shape)), np.array2string(value.ravel()[:6], precision=5)]
            for name, value in answer.outputs.items()
        ],
    )


def gateway_of(context: Context) -> str:
    """The context's gateway, else the first that the coordinator names."""
    if context.gateway_rest:
        return context.gateway_rest
    with Region(context) as api:
        found = api.who_am_i().gateways_rest
    if not found:
        raise refuse(Code.NOT_FOUND, "the region has no gateway that is ready", "one", "shoal-agent run --role gateway")
    return found[0]


def _read(path: Path, client: Inference, workload: str) -> dict[str, Any]:
    unreadable = refuse(Code.SOURCE_UNREACHABLE, f"{path}", "a readable .npz, .npy or .json", "correct the file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        if path.suffix == ".npy":
            return {client.metadata(workload)["inputs"][0]["name"]: np.load(path, allow_pickle=False)}
        if path.suffix == ".json":
            request = json.loads(path.read_text())
            return {
                tensor["name"]: np.array(tensor["data"], DTYPES.get(tensor["datatype"], object)).reshape(
                    tensor["shape"]
                )
                for tensor in request["inputs"]
            }
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise unreadable from cause
    raise unreadable
