"""README and docs as a reader uses them: the tutorial, then the examples of the command line's verbs and every page in
the region that it left, then the tutorial's end.

Each command of a block of shell is typed, and has to end well; the region plans each YAML document. A block that cannot
be typed here says why, in `<!-- not run: .. -->` above it; for an example `NOT_TYPED` does. Here are no systemd, no
Docker engine, no cluster and no accelerator, and four minutes for everything."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from onnx import numpy_helper

from harness.clients import tutorial
from harness.clients.example_needs import AT_THE_END, COMMON_NEEDS, EXAMPLE_NEEDS, LATER, NOT_TYPED
from harness.clients.page_needs import COMMON, KEPT, LISTEN, NEEDS, Needs
from harness.clients.pages import SHELL, PageReader, PageResult, pages
from harness.clients.resident_shoal import resident_shoal
from harness.clients.tutorial_end import NODE, type_the_end
from harness.documentation import ROOT, snippets
from harness.models.speech import DETECTOR
from harness.models.synthetic import padded_model, with_constant
from harness.ports import free_ports
from harness.report import record
from shoal.cli.examples import EXAMPLES
from shoal.client import Contexts
from shoal.devstack.control import Control

pytestmark = pytest.mark.timeout(600)

MODELS: Final = "M=$(python -c \"import sysconfig; print(sysconfig.get_path('purelib'))\")/rapidocr_onnxruntime/models"
"""As in the tutorial."""
MIN_WORDS: Final = 4
"""Of a reason."""
MAX_NOT_RUN: Final = 40
"""Blocks of all pages that may say that they cannot be typed."""
MAX_NOT_TYPED: Final = 0.15
"""Part of all examples that may be listed as such that cannot be typed."""
TYPED_ELSEWHERE: Final = {"docs/tutorial.md": "here, first", "docs/guides/fleet.md": "test_forty_shops.py"}
LAST: Final = (
    "docs/guides/federation.md",
    "docs/how-to/burst-to-another-region.md",
    "docs/operations.md",
    "docs/guides/identity.md",
)
"""Pages after which the region is another one: it joins the federation again, is restored beside itself, and has other
operators and another CA."""


def ordered_pages() -> list[str]:
    found = [
        page.relative_to(ROOT).as_posix()
        for page in pages()
        if any(block.language in (*SHELL, "yaml") for block in snippets(page))
    ]
    return [*(page for page in found if page not in (*TYPED_ELSEWHERE, *LAST)), *LAST]


PAGES: Final = ordered_pages()


def as_typed(reader: PageReader, needs: Needs, text: str) -> str:
    for pattern, instead in (*needs.instead, *COMMON):
        for found in reversed([*re.finditer(pattern, text, re.MULTILINE)]):
            text = text[: found.start()] + value_of(reader, found.expand(instead)) + text[found.end() :]
    return text


def value_of(reader: PageReader, name: str) -> str:
    """With what is in braces looked up."""
    return re.sub(r"\{(\w+)\}", lambda found: VALUES[found[1]](reader) if found[1] in VALUES else found[0], name)


def newest_migration(reader: PageReader) -> str:
    with reader.api() as api:
        return api.get("migrations").migrations[-1].id


def newest_negotiation(reader: PageReader) -> str:
    found = re.findall(r"\bt-[0-9a-f]{12}\b", reader.terminal.type("shoal federation bids -o json"))
    return str(found[-1])


def public_key(reader: PageReader) -> str:
    (found,) = re.findall(r"\bMCow[\w+/=]+", reader.terminal.type("shoal model key shop-release.pem"))
    return str(found)


VALUES: Final[dict[str, Callable[[PageReader], str]]] = {
    "token": lambda reader: reader.token,
    "plan": lambda reader: reader.plan,
    "trace": lambda reader: reader.trace,
    "migration": newest_migration,
    "negotiation": newest_negotiation,
    "key": public_key,
    "link": lambda reader: reader.port_of("coordinator", "link"),
    "enrol": lambda reader: reader.port_of("coordinator", "enrol"),
    "dashboard": lambda reader: reader.port_of("coordinator", "dashboard"),
    "federation": lambda reader: reader.port_of("federation-1", "enrol"),
    "gateway": lambda reader: reader.contexts.get("dev").gateway,
    "port": lambda reader: str(free_ports(1)[0]),
    "coordinator": lambda reader: str(reader.control.folder / "coordinator"),
    "operator": lambda reader: str(reader.control.folder / "coordinator" / "operator"),
    "dev": lambda reader: str(reader.control.folder),
    "listen": lambda reader: LISTEN,
    "checkout": lambda reader: str(ROOT),
}


def prepare(reader: PageReader) -> None:
    """Files of the repository that pages name. Examples get small models, and latencies that processors keep while
    other tests share them."""
    folder = reader.terminal.folder / "policies" / "examples"
    shutil.copytree(ROOT / "policies" / "examples", folder, dirs_exist_ok=True)
    for path in folder.glob("*.yaml"):
        path.write_text(re.sub(r"p95: (\d+)ms", r"p95: \g<1>00ms", path.read_text()))
    text = "".join(path.read_text() for path in folder.glob("*.yaml"))
    (folder / "models").mkdir(exist_ok=True)
    names = {*re.findall(r"\./models/([\w.-]+\.onnx)", text), "parcel-sort-v8.onnx"}
    for number, name in enumerate(sorted(names), 1):
        (folder / "models" / name).write_bytes(small_model(name, number))
    reader.terminal.type(MODELS)
    reader.terminal.type("export BROWSER=true SHOAL_METRICS=127.0.0.1:0 SHOAL_FRONT_METRICS=127.0.0.1:0")
    reader.terminal.type("shoal get regions/home -o yaml > home.yaml; shoal delete workload sturdy-reader || true")


def small_model(name: str, number: int) -> bytes:
    """Of the precision that its name says, and no two alike."""
    if "silero" in name:
        return DETECTOR.read_bytes()
    if "int8" in name:
        return padded_model(1000 * number)
    return with_constant(numpy_helper.from_array(np.full(64, number, np.float32), "unread"))


def read_page(reader: PageReader, page: Path) -> PageResult:
    """With what it needs; the region is as before behind it."""
    needs = NEEDS.get(page.relative_to(ROOT).as_posix(), Needs())

    def instead_of(text: str) -> str:
        return as_typed(reader, needs, text)

    with ExitStack() as behind:
        behind.callback(delete_others, reader)
        for command in reversed(needs.after):
            behind.callback(reader.type_command, instead_of(command), range(256))
        for command in needs.before:
            reader.type_command(instead_of(command))
        return reader.read(page, instead_of)


def typed_examples() -> dict[str, list[str]]:
    """Verb -> its examples that are typed, but for those of a verb before it."""
    found, seen = dict[str, list[str]](), set[str]()
    for verb in (*(verb for verb in EXAMPLES if verb not in LATER), *LATER):
        lines = [line for line, _ in EXAMPLES[verb] if not (line in seen or line in AT_THE_END or is_not_typed(line))]
        if lines:
            found[verb] = lines
        seen.update(lines)
    return found


def is_not_typed(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in NOT_TYPED)


TYPED: Final = typed_examples()


def type_example(reader: PageReader, line: str) -> str:
    """With what it needs; the next one finds the region of the tutorial."""
    needs = EXAMPLE_NEEDS.get(line, Needs())
    alike = Needs(instead=(*needs.instead, *COMMON_NEEDS.instead))
    with ExitStack() as behind:
        for command in reversed(needs.after):
            behind.callback(type_around, reader, command)
        for command in needs.before:
            type_around(reader, command)
        return reader.type_command(as_typed(reader, alike, line))


def type_around(reader: PageReader, command: str) -> None:
    """What an example needs, or leaves to be done."""
    reader.type_command(as_typed(reader, COMMON_NEEDS, command))


def delete_others(reader: PageReader) -> None:
    with reader.api() as api:
        for view in api.get("workloads").workloads:
            if view.workload.name not in KEPT and view.state != "deleting":
                api.delete("workload", view.workload.name, view.workload.tenant)


@dataclass(frozen=True)
class Walk:
    """The tutorial, typed to its end, and somebody who goes on from there."""

    reader: PageReader
    result: tutorial.WalkthroughResult


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("pages")
    contexts = Contexts(folder / "home")
    control = Control(folder / "dev", contexts)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    own = {"SHOAL_HOME": str(contexts.folder), "SHOAL_DEV_DIR": str(control.folder), "COLUMNS": "300"}
    (folder / "root").mkdir()
    try:
        with tutorial.terminal(folder / "root", plain | own) as terminal, resident_shoal(folder) as programs:
            tutorial.start_regions(terminal, tutorial.PROCESSES)
            result = tutorial.run_walkthrough(terminal, contexts)
            terminal.type(f"export PATH={programs}:$PATH HOME={folder}")
            reader = PageReader(terminal, contexts, control)
            prepare(reader)
            yield Walk(reader, result)
    finally:
        control.down()


def test_the_tutorial_on_processes(walk: Walk) -> None:
    assert (walk.result.lost_count, walk.result.wrong_count) == (0, 0), walk.result


@pytest.fixture(scope="module")
def reader_of_examples(walk: Walk) -> PageReader:
    """With the files that examples name."""
    for command in COMMON_NEEDS.before:
        walk.reader.type_command(as_typed(walk.reader, COMMON_NEEDS, command))
    return walk.reader


@pytest.mark.parametrize("verb", TYPED)
def test_a_reader_can_type_the_examples(reader_of_examples: PageReader, verb: str) -> None:
    """As the help of the command line and its page of the reference show them."""
    for line in TYPED[verb]:
        print(f"$ {line}\n{type_example(reader_of_examples, line)}")
    record("examples of the verbs", "P", 1, verb=verb, typed=len(TYPED[verb]))


def test_few_examples_cannot_be_typed_and_each_says_why() -> None:
    lines = {line for examples in EXAMPLES.values() for line, _ in examples}
    left = [line for line in sorted(lines) if is_not_typed(line)]
    print(f"{len(left)} of {len(lines)} are not typed:", *left, sep="\n")
    assert len(left) <= MAX_NOT_TYPED * len(lines)
    assert [pattern for pattern in NOT_TYPED if not any(re.fullmatch(pattern, line) for line in lines)] == []
    assert [reason for reason in NOT_TYPED.values() if len(reason.split()) < MIN_WORDS] == []
    assert {line for each in TYPED.values() for line in each} == lines - {*left, *AT_THE_END}
    assert {*EXAMPLE_NEEDS, *AT_THE_END} <= lines - {*left}
    assert TYPED.keys() >= {*LATER}


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_can_type_the_page(walk: Walk, page: str) -> None:
    result = read_page(walk.reader, ROOT / page)
    print(f"{page}: {result.commands} commands typed, {result.documents} documents planned, not: {result.not_run}")
    record(
        "commands of the docs", "P", 1, page=page, typed=result.commands, documents=result.documents,
        not_run=len(result.not_run),
    )  # fmt: skip


def test_few_blocks_cannot_be_typed_and_each_says_why() -> None:
    marked = [block for page in pages() for block in snippets(page) if block.not_run]
    print(*(f"{block.place}: {block.not_run}" for block in marked), sep="\n")
    assert len(marked) <= MAX_NOT_RUN
    assert {block.language for block in marked} <= set(SHELL)
    assert [block.place for block in marked if len(block.not_run.split()) < MIN_WORDS] == []


def test_the_end_of_the_tutorial(walk: Walk) -> None:
    """It breaks and ends the regions: nothing can be typed in them behind it."""
    result = type_the_end(walk.reader)
    assert (result.lost_count, result.wrong_count) == (0, 0), result
    missed = re.findall(rf"\b(NODE_SUSPECT|NODE_LOST)  {NODE}\b", result.events)
    assert len(missed) >= 2, f"killed, and cut off: {result.events}"
    assert not walk.reader.control.running()
    for line in AT_THE_END:
        walk.reader.type_command(line)
    assert not walk.reader.control.folder.exists()
    record(
        "end of the tutorial", "P", 1, typed=result.commands + len(AT_THE_END), sent=result.sent_count, lost=0,
        wrong=0,
    )  # fmt: skip
