"""Since when nodes and tokens are there, as the command line lists it."""

import csv
import io

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack
from harness.wait import wait_until

UNKNOWN = "-"
NODE = "edge-9"
"""Which the token of this test is bound to; it never joins."""

Rows = dict[str, dict[str, str]]
"""By name, each row's text in each column."""


def rows_of(stack: DevStack, kind: str) -> Rows:
    done = stack.shoal("get", kind, "-o", "csv")
    assert done.returncode == 0, done.stderr
    return {next(iter(row.values())): row for row in csv.DictReader(io.StringIO(done.stdout))}


def check_ages_outlive_the_coordinator(stack: DevStack) -> None:
    """Kills the region's one coordinator, which its supervisor starts again."""
    created = stack.shoal("token", "create", "--name", NODE)
    assert created.returncode == 0, created.stderr
    nodes, tokens = rows_of(stack, "nodes"), rows_of(stack, "tokens")
    (token,) = [each for each, row in tokens.items() if row["name"] == NODE]
    joined = {name: row["joined"] for name, row in nodes.items()}
    assert joined, "it has no node"
    assert UNKNOWN not in {*joined.values(), *(row["age"] for row in nodes.values())}
    assert UNKNOWN not in {tokens[token]["made"], tokens[token]["age"]}
    stack.kill("coordinator/coordinator")

    def rows_of_new_sessions() -> Rows | None:
        rows = rows_of(stack, "nodes")
        ready = [name for name, row in rows.items() if row["liveness"] == "ready"]
        newer = [name for name in ready if int(rows[name]["epoch"]) > int(nodes[name]["epoch"])]
        return rows if set(newer) == nodes.keys() else None

    again = wait_until(rows_of_new_sessions, WAIT_TIMEOUT_S, "a new session of every node")
    assert again is not None
    assert {name: row["joined"] for name, row in again.items()} == joined
    assert rows_of(stack, "tokens")[token]["made"] == tokens[token]["made"]
    described = stack.shoal("describe", "node", *joined).stdout
    assert all(f" ago, {at}" in described for at in joined.values()), described
    assert stack.shoal("delete", "token", token).returncode == 0
