"""The pages of the gRPC services and their messages, from the .proto files and their comments."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from generators.markdown import GENERATED, code, page, table, wrap

ROOT: Final = Path(__file__).parents[2] / "protos/shoal"

PAGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "inference": (
        "Inference: the Open Inference Protocol, health and reflection",
        ("inference/open_inference", "inference/onnx_inputs", "inference/health", "inference/reflection"),
    ),
    "operator": ("Operator API", ("v1/operator",)),
    "enrolment": ("Enrolment", ("v1/enrolment",)),
    "artifacts": ("Models and samples", ("v1/artifacts",)),
    "link": ("Agent link: gRPC and MQTT", ("v1/link", "v1/mqtt")),
    "federation": ("Between regions", ("v1/federation",)),
    "nodes": ("Between nodes: sessions and comparisons", ("v1/sessions", "v1/witness")),
    "nouns": ("Shared messages", ("v1/nouns",)),
}
"""Name of the page -> its title and files. The protocol of etcd is not ours and is left out."""


@dataclass(slots=True)
class Entry:
    """A method of a service, or a field of a message, or a value of an enumeration."""

    # `Plan(PlanRequest) returns (PlanReply)`, or `string node = 1`.
    text: str
    # The comments above it, and behind it.
    meaning: str


@dataclass(slots=True)
class Block:
    """A service, a message or an enumeration."""

    # service, message or enum.
    kind: str
    # With the messages around it: `Outer.Inner`.
    name: str
    # The comments above it.
    meaning: str
    entries: list[Entry] = field(default_factory=list)


def pages() -> dict[str, Callable[[], str]]:
    """Path below docs -> what writes it."""
    return {f"reference/grpc/{name}.md": partial(_page, name) for name in PAGES}


def _page(name: str) -> str:
    title, files = PAGES[name]
    return page(_lines(title, files))


def _lines(title: str, files: tuple[str, ...]) -> Iterator[str]:
    yield f"# {title}"
    yield ""
    yield GENERATED
    yield ""
    for file in files:
        yield f"## {file}.proto"
        yield ""
        intro, blocks = read((ROOT / f"{file}.proto").read_text())
        yield from wrap(intro)
        for block in blocks:
            yield f"### {block.kind} {block.name}"
            yield ""
            if block.meaning:
                yield from wrap(block.meaning)
            head = ("method" if block.kind == "service" else "field" if block.kind == "message" else "value", "meaning")
            if block.entries:
                yield from table(head, [(code(each.text), each.meaning) for each in block.entries])


_OPENS: Final = re.compile(r"(service|message|enum|oneof)\s+(\w+)\s*\{(?P<whole>(?P<inside>.*)\})?")


def read(text: str) -> tuple[str, list[Block]]:
    """(comment at the head of the file, its blocks). For files that are formatted as ours are: an entry a line."""
    intro, _, body = text.partition("\nsyntax =")
    blocks: list[Block] = []
    stack: list[Block] = []
    comment: list[str] = []
    held = ""
    for line in (each.strip() for each in body.split("\n")[1:]):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        opened = _OPENS.match(line)
        if opened is not None:
            kind, name = opened[1], opened[2]
            if kind == "oneof":
                stack.append(stack[-1])
            else:
                outer = f"{stack[-1].name}." if stack else ""
                blocks.append(Block(kind, outer + name, " ".join(comment)))
                stack.append(blocks[-1])
            if opened["whole"] is not None:
                inside = [each.strip() for each in opened["inside"].split(";")]
                stack.pop().entries.extend(Entry(each, "") for each in inside if each)
        elif line == "}":
            stack.pop()
        elif stack and line:
            held = f"{held} {line}".strip()
            statement, semicolon, behind = held.partition(";")
            if not semicolon:
                continue
            held = ""
            meaning = " ".join([*comment, behind.replace("//", "").strip()]).strip()
            if not statement.startswith(("reserved ", "option ")):
                stack[-1].entries.append(Entry(statement.removeprefix("rpc ").strip(), meaning))
        comment = []
    return " ".join(each.removeprefix("//").strip() for each in intro.split("\n")), blocks
