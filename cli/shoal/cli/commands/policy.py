"""`shoal policy`: templates to start from, the schema for editors."""

import json
from importlib.resources import files

import click

from shoal.policies.kinds import KINDS
from shoal.policies.schema import schema as json_schema


@click.group()
def policy() -> None:
    """The policy language: commented templates, the JSON Schema."""


@policy.command()
@click.argument("kind", type=click.Choice([kind.lower() for kind in KINDS]), default="policy")
def new(kind: str) -> None:
    """Print a commented template of KIND: `shoal policy new workload > mine.yaml`."""
    print(files("shoal.policies").joinpath("templates", f"{kind}.yaml").read_text(), end="")


@policy.command()
def schema() -> None:
    """Print the JSON Schema of all kinds, for editors."""
    print(json.dumps(json_schema(), indent=1))
