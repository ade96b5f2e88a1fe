"""`shoal model`: what a model is; putting it into the region's store and out again."""

from pathlib import Path

import click

from shoal.cli.options import connected, connection, output
from shoal.cli.render.data import as_data
from shoal.cli.render.output import emit, line
from shoal.cli.render.progress import bytes_progress
from shoal.cli.render.resources import rows_of, show, show_profile
from shoal.types.codes import Code, refuse


@click.group()
def model() -> None:
    """Models of the region, by name and digest."""


@model.command()
@click.argument("model")
@connection
@output
def inspect(model: str, context: str, region: str, output: str) -> None:
    """What MODEL asks of a device: operators, FLOPs, weights, inputs. MODEL: a file, or a pushed name or digest."""
    with connected(context, region) as api:
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
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", default="", help="Name for use as a workload's source. [default: the file's, without .onnx]")
@connection
@output
def push(file: Path, name: str, context: str, region: str, output: str) -> None:
    """Send FILE (.onnx) to the region. It is inspected in a sandbox before it is stored."""
    if not file.is_file():
        raise refuse(Code.SOURCE_UNREACHABLE, f"no file {file}", "an .onnx file", "correct the path")
    with connected(context, region) as api, bytes_progress(f"push {file.name}", file.stat().st_size) as progress:
        reply = api.push(file, name or model_name(file), progress)
    if output in ("json", "yaml"):
        emit(as_data(reply), output)
    else:
        line(f"{reply.model.name}  {reply.model.digest}" + ("  (was there)" if reply.existed else ""))


def model_name(file: Path) -> str:
    """A lawful name out of a file's."""
    text = "".join(char if char.isascii() and char.isalnum() else "-" for char in file.stem.lower())
    return "-".join(part for part in text.split("-") if part)[:63]


@model.command()
@connection
@output
def ls(context: str, region: str, output: str) -> None:
    """The models of the region."""
    with connected(context, region) as api:
        messages = rows_of(api, "models", "", "")
    if output in ("json", "yaml"):
        emit([as_data(message) for message in messages], output)
    else:
        show("models", messages, wide=output == "wide")


@model.command()
@click.argument("name")
@connection
def rm(name: str, context: str, region: str) -> None:
    """Remove a model by name or digest; refused IN_USE while a workload names it."""
    with connected(context, region) as api:
        reply = api.remove_model(name)
    line(f"removed {name}" + ("" if reply.bytes_removed else "; other names keep its bytes"))
