"""Every verb by purpose: a line for the help, and the module that is imported when the verb is used."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import click


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of `shoal`."""

    # As it is typed.
    name: str
    # One line of the help, at most 60 characters.
    summary: str
    # Below `shoal.cli.commands`; empty: the verb's own name.
    module: str = ""

    def load(self) -> click.Command:
        """Import the command."""
        path = self.module or self.name.replace("-", "_")
        module = importlib.import_module(f"shoal.cli.commands.{path}")
        command = getattr(module, self.name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


GROUPS: Final[Mapping[str, tuple[Verb, ...]]] = {
    "Begin": (
        Verb("demo", "see all of it happen on this machine, in two minutes"),
        Verb("dev", "regions on this machine that stay: up, down, break"),
        Verb("context", "which region to call, and as whom"),
        Verb("version", "of this command, and of the region"),
        Verb("completion", "for bash, zsh and fish, with names from the region"),
    ),
    "Say what you want": (
        Verb("policy", "templates, a wizard, and the schema for editors"),
        Verb("validate", "find every mistake in YAML files, without a region"),
        Verb("plan", "what apply would do, and why"),
        Verb("apply", "store documents, and place what they ask for"),
        Verb("delete", "delete documents, nodes or tokens"),
    ),
    "See what there is, and why": (
        Verb("status", "the region on one screen"),
        Verb("top", "the region on one screen, live"),
        Verb("dashboard", "the region in a browser, live"),
        Verb("get", "list nodes, devices, models, workloads, placements"),
        Verb("describe", "everything about one thing"),
        Verb("explain", "why a workload is where it is; what a code means"),
        Verb("events", "what happened, and what happens"),
        Verb("trace", "where the time of a request, move or trade went"),
        Verb("logs", "a node's log, or the coordinator's"),
    ),
    "Use it": (
        Verb("infer", "send one request through the gateway"),
        Verb("model", "push, inspect, sign and remove models"),
    ),
    "Move it": (
        Verb("can-move", "whether a workload could run there, and at what price"),
        Verb("migrate", "move a replica, live, verified first"),
        Verb("drain", "empty a node, live", "migrate"),
        Verb("cordon", "keep new work off a node"),
        Verb("uncordon", "let a node take new work again", "cordon"),
        Verb("rollback", "back to an earlier revision, by a live move"),
        Verb("history", "who changed what, and when", "rollback"),
    ),
    "Run a region": (
        Verb("doctor", "what is wrong, and what mends it"),
        Verb("token", "let devices, operators and clients in"),
        Verb("node", "label, measure, release or revoke a node"),
        Verb("ca", "the region's certificate authority"),
        Verb("region", "price and carbon by hand, other regions' measurements"),
        Verb("federation", "other regions: members, bids, agreements, ledger"),
        Verb("upgrade", "a new version in waves, halted by its guards"),
        Verb("backup", "the region's state in one file"),
        Verb("restore", "a backup, back", "backup"),
        Verb("support-bundle", "what support needs, without secrets", "support"),
        Verb("bench", "measure a workload, or run the benchmarks"),
    ),
}
"""Heading of the help -> its verbs, in order."""
