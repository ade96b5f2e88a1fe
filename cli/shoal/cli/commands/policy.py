"""`shoal policy`: a template to start from, the schema for editors."""

import json

import click

from shoal.policies.schema import schema as json_schema
from shoal.policies.templates import template


@click.group()
def policy() -> None:
    """The policy language: a commented template, the JSON Schema."""


@policy.command()
def new() -> None:
    """Print a commented template: `shoal policy new > my.yaml`."""
    print(template(), end="")


@policy.command()
def schema() -> None:
    """Print the JSON Schema of all kinds, for editors."""
    print(json.dumps(json_schema(), indent=1))
