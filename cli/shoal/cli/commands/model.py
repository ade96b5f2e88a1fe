"""`shoal model`: inspect models, and add them to the region's store or remove them."""

from pathlib import Path

import click

from shoal.cli.commands.signing import key, sign, verify
from shoal.cli.listing import ListingOptions, Target, listing, run_listing
from shoal.cli.model_sources import FORMS, model_file
from shoal.cli.modelfiles import model_name, signature_of
from shoal.cli.names import MODEL
from shoal.cli.options import TENSOR_SHAPE, connect, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line
from shoal.cli.render.progress import bytes_progress
from shoal.cli.render.resources import show_profile, signer
from shoal.client.transfers import digest_of
from shoal.types.codes import Code, refuse


@click.group()
def model() -> None:
    """Models of the region, by name and digest."""


@model.command()
@click.argument("model", type=MODEL)
@connection
@output
def inspect(model: str, context: str, region: str, output: str) -> None:
    """What MODEL asks of a device: operators, FLOPs, weights, inputs. MODEL: a file, or a pushed name or digest."""
    with connect(context, region) as api:
        if Path(model).is_file():
            found = api.inspect(Path(model)).model
        else:
            models = api.models(model)
            if not models:
                raise refuse(
                    Code.MODEL_UNKNOWN, f"neither a file nor a pushed model: {model}", "one of both", "shoal model ls"
                )
            found = models[0]
    if output in ("json", "yaml"):
        emit(as_data(found), output)
    else:
        show_profile(found)


@model.command()
@click.argument("source", metavar=FORMS)
@click.option("--name", default="", help="Name for use as a workload's source. [default: the file's, without .onnx]")
@click.option("--digest", default="", metavar="sha256:HEX", help="Refuse any other file than this, before it is sent.")
@click.option(
    "--signature",
    "-s",
    type=click.Path(path_type=Path),
    help="An OpenSSF model signature. [default: FILE.sig if it is there]",
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path),
    help="An .npz of inputs (and answers) to warm replicas up with, where a workload brings none of its own.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=TENSOR_SHAPE,
    metavar="INPUT=1x3x48x320",
    help="Lengths of an input, to count costs at and warm up with; ? leaves an axis to the inspection. Repeat.",
)
@connection
@output
def push(
    source: str, name: str, digest: str, signature: Path | None, samples: Path | None,
    shapes: tuple[tuple[str, tuple[int, ...]], ...], context: str, region: str, output: str,
) -> None:  # fmt: skip
    """Send a model to the region: its signature is verified, it is inspected in a sandbox, then stored.

    It is an .onnx file, a folder with one, a URL, an artifact of an OCI registry (oci://REGISTRY/REPOSITORY:TAG or
    @sha256:HEX), or a file of a model hub (hf://OWNER/NAME@REVISION/FILE.onnx). Tensors in files beside it are put into
    the one file that is sent.
    """
    if samples is not None and not samples.is_file():
        raise refuse(Code.SOURCE_UNREACHABLE, f"no file {samples}", "an .npz file", "correct the path")
    with model_file(source, digest) as file, connect(context, region) as api:
        _, size = digest_of(file)
        signed = signature_of(file, signature)
        name = name or model_name(Path(source) if Path(source).is_dir() else file)
        with bytes_progress(f"push {file.name}", size) as progress:
            reply = api.push(file, name, progress, signature=signed, shapes=dict(shapes))
        if samples is not None:
            with bytes_progress(f"push {samples.name}", samples.stat().st_size) as progress:
                api.push_samples(samples, reply.model.digest, progress)
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        signers = "".join(f"  signed by {signer(one)}" for one in reply.model.signatures)
        line(f"{reply.model.name}  {reply.model.digest}" + ("  (was there)" if reply.existed else "") + signers)


@model.command()
@listing
@connection
def ls(watch: bool, sort_by: str, selector: str, output: str, context: str, region: str) -> None:
    """The models of the region, as `shoal get models` lists them."""
    with connect(context, region) as api:
        run_listing(api, [Target("models")], ListingOptions(output, selector, sort_by, watch=watch))


@model.command()
@click.argument("name", type=MODEL)
@connection
def rm(name: str, context: str, region: str) -> None:
    """Remove a model by name or digest; refused IN_USE while a workload names it. Also samples, and a reference that
    a replica recorded, by digest."""
    with connect(context, region) as api:
        reply = api.remove_model(name)
    line(f"removed {name}" + ("" if reply.bytes_removed else "; other names keep its bytes"))


@model.command()
@click.argument("name", type=MODEL)
@click.option("--allow", type=click.IntRange(1), metavar="VERSION", help="Let this older signed version back.")
@connection
def clear(name: str, allow: int | None, context: str, region: str) -> None:
    """Forget what is held against a model: that it is poisoned, that a runtime did not load it, or
    (--allow) that a newer signed version was seen."""
    with connect(context, region) as api:
        cleared = api.clear_model(name, allow or 0).cleared
    if allow is not None:
        line(f"{name} version {allow} may run again, until a newer one than the newest is pushed")
    else:
        line("\n".join(f"may be tried again: {each}" for each in cleared) or f"nothing is held against {name}")


for command in (sign, verify, key):
    model.add_command(command)
