"""`Break it`, the end of the tutorial: a machine is hurt under load, and then all of it is stopped.

The reader watches: what the events say is waited for before the next command, however fast one types."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from harness.clients import tutorial
from harness.clients.pages import PageReader
from harness.wait import wait_until
from shoal.devstack.load import ClosedLoopLoad

WORKLOAD: Final = "sturdy-reader"
"""Of two replicas; the page has it placed just before."""
NODE: Final = "edge-npu"
WATCH: Final = "shoal events -w &"
DOWN: Final = "shoal dev down"
BREAKS: Final[Mapping[str, bool]] = {
    f"shoal dev break {NODE} kill": False,
    f"shoal dev break {NODE} resume": True,
    f"shoal dev break {NODE} cut": False,
    f"shoal dev break {NODE} heal": True,
}
"""Command -> whether the region then takes the machine for one that answers."""
SEEN_WITHIN_S: Final = 60.0
"""A silent machine is suspect after seconds, and one that starts joins after some; on two cores that others share."""


@dataclass(frozen=True, slots=True)
class EndResult:
    """What the load had while its machines were hurt."""

    # Commands of the page that were typed.
    commands: int
    # Requests sent.
    sent_count: int
    # Of them without an answer.
    lost_count: int
    # Answers that were not ONNX Runtime's bits.
    wrong_count: int
    # What `shoal events -w` printed.
    events: str


def type_the_end(reader: PageReader) -> EndResult:
    """Nothing runs behind it. The region is as the tutorial left it before this heading."""
    (block, *others) = tutorial.blocks_of(tutorial.PAGE.read_text().partition(tutorial.END)[2])
    assert not others, "what follows is typed by nobody"
    commands = [command.partition("#")[0].strip() for command in block.commands]
    assert (commands[0], commands[-1]) == (WATCH, DOWN)
    assert [command for command in commands if "dev break" in command] == [*BREAKS]
    reader.type_command("shoal apply -f examples/sturdy.yaml --wait")
    reader.type_command("shoal context client breaker")
    context = replace(reader.contexts.get(), folder=str(reader.terminal.folder / "breaker"))
    output = reader.terminal.folder / "events.txt"
    reader.terminal.type(f"shoal events -w > {output} & events=$!")
    with tutorial.background_load(reader.terminal, context, WORKLOAD) as load:
        for command in commands[1:-1]:
            reader.type_command(command)
            if command in BREAKS:
                _wait_seen(reader, BREAKS[command])
                wanted = load.outcomes()["ok"] + tutorial.MIN_ANSWERS
                wait_until(partial(_has_answered, load, wanted), SEEN_WITHIN_S, f"answers after {command}")
    reader.type_command(DOWN)
    reader.terminal.type("wait $events", SEEN_WITHIN_S, range(256))
    return EndResult(len(commands), len(load.calls), load.lost_count, load.wrong_count, output.read_text())


def _has_answered(load: ClosedLoopLoad, count: int) -> bool:
    return load.outcomes()["ok"] >= count


def _wait_seen(reader: PageReader, is_well: bool) -> None:
    def is_seen() -> bool:
        with reader.api() as api:
            (row,) = api.get("nodes", NODE).nodes
        return (row.liveness == "ready" and bool(row.front_ready)) == is_well

    wait_until(is_seen, SEEN_WITHIN_S, f"{NODE} to be {'ready' if is_well else 'missed'}")
