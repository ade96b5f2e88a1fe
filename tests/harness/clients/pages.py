"""The pages of the docs as a reader types them: each command of each block of shell into one shell, in a region of
`shoal dev up`, and each YAML document given to that region."""

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from harness.clients import tutorial
from harness.documentation import ROOT, Snippet, snippets
from harness.wait import wait_until
from shoal.client import Contexts, RegionClient
from shoal.devstack.control import Control

COMMAND_WITHIN_S: Final = 120.0
"""For one command, on two cores that others share."""
COMMAND_LINE: Final = ROOT / "docs" / "reference" / "command-line.md"
SHELL: Final = ("sh", "bash")
STAYS: Final = {
    r"shoal (events|get)\b.* -w\b": r"\S",
    r"shoal logs\b.* -f\b": r"\S",
    r"shoal dashboard\b": r"https?://",
    r"shoal top\b": r"\S",
    r"shoal ca rotate$": r"\S",
    r"shoal-agent run\b": r'"event": "listening"',
    r"shoal-coordinator run\b": r'"event": "ready"',
}
"""What goes on until somebody presses Ctrl-C, and what it shows before anybody would."""
INTERRUPTED: Final = (0, 130)
"""Statuses of what was ended by Ctrl-C."""
AROUND: Final = {"Policy": {}, "Workload": {"model": {"source": "ppocr-rec"}}, "Region": {}}
"""Kinds that a part of a document may be of, and what such a document cannot do without."""
TOKEN: Final = re.compile(r"shoal-(?:join|bearer)\.\S+")
TRACE: Final = re.compile(r"\b[0-9a-f]{32}\b")
OF_OTHERS: Final = r"^apiVersion: (?!shoal/)"
"""What a region has nothing to say of: tests of manifests build the overlays."""
PLAN: Final = re.compile(r"^plan ([0-9a-f]{16})$", re.MULTILINE)
_DOCUMENT: Final = re.compile(r"^(apiVersion|kind):", re.MULTILINE)


def shell_commands(text: str) -> Iterator[str]:
    """The complete commands of a block: what follows a backslash, a quotation or a keyword that is open belongs to one.
    Comments behind a command are left out."""
    found = ""
    for line in text.splitlines():
        found += re.sub(r"(^|\s+)#(?!/).*$", "", line) + "\n"
        if found.strip() and _is_complete(found):
            yield found.strip()
            found = ""
    assert not found.strip(), f"a command that does not end: {found}"


def _is_complete(text: str) -> bool:
    """Whether a shell would run it, rather than wait for more."""
    checked = subprocess.run(["bash", "-n", "-c", text], stderr=subprocess.PIPE, text=True, timeout=10)
    return checked.returncode == 0 and not text.endswith("\\\n")


def stays(command: str) -> str:
    """What a command that goes on shows; empty for one that ends."""
    (*_, last) = ["", *(shown for begins, shown in STAYS.items() if re.search(rf"(?:^|[\w]=\S* ){begins}", command))]
    return last if not command.endswith("&") else ""


@dataclass(slots=True)
class PageResult:
    """What became of a page."""

    # Commands that were typed.
    commands: int = 0
    # Documents that the region took.
    documents: int = 0
    # Blocks that say why they cannot be typed here.
    not_run: list[str] = field(default_factory=list)


class PageReader:
    """Somebody at a shell, in a region that runs, with the files that the tutorial left."""

    def __init__(self, terminal: tutorial.Terminal, contexts: Contexts, control: Control) -> None:
        self.terminal = terminal
        self.contexts = contexts
        self.control = control
        self.token = "no token was printed yet"
        self.trace = "no trace was printed yet"
        self.plan = "no plan was printed yet"

    def api(self, context: str = "dev") -> RegionClient:
        return RegionClient(self.contexts.get(context))

    def port_of(self, member: str, name: str) -> str:
        (row,) = (row for row in self.control.status() if row["name"] == member)
        return str(row["ports"][name])

    # -- pages ---------------------------------------------------------------------------------------------------------

    def read(self, page: Path, replace: Callable[[str], str]) -> PageResult:
        """Type the whole page. replace: what the reader types in place of what the page shows."""
        result = PageResult()
        for block in snippets(page):
            if block.language == "span":
                continue
            if block.not_run:
                result.not_run.append(f"{block.place}: {block.not_run}")
            elif block.language in SHELL:
                result.commands += self.type_block(block, replace)
            elif block.language == "yaml":
                result.documents += self.plan_documents(block, replace)
        return result

    def type_block(self, block: Snippet, replace: Callable[[str], str]) -> int:
        count = 0
        for command in shell_commands(block.text):
            try:
                self.type_command(replace(command))
            except AssertionError as error:
                raise AssertionError(f"{block.place}: {error}") from error
            count += 1
        return count

    def type_command(self, command: str, statuses: Sequence[int] = ()) -> str:
        shown = stays(command)
        if shown:
            return self._type_until(command, shown)
        allowed = statuses or tutorial.statuses_of(command)
        printed = self.terminal.type(command, COMMAND_WITHIN_S, allowed)
        self._remember(printed)
        return printed

    def _type_until(self, command: str, shown: str) -> str:
        """Press Ctrl-C when it has shown that."""
        output = self.terminal.folder / "stayed.txt"
        self.terminal.type(f"rm -f {output}; set -m; {{ {command}; }} > {output} 2>&1 & stayed=$!; set +m")

        def has_shown() -> bool:
            return re.search(shown, output.read_text(errors="replace")) is not None

        end = "kill -INT -- -$stayed; wait $stayed"
        try:
            wait_until(has_shown, COMMAND_WITHIN_S, f"{command} to show {shown!r}")
        except AssertionError as error:
            self.terminal.type(end, COMMAND_WITHIN_S, range(256))
            raise AssertionError(f"{error}: {output.read_text()[-2000:]}") from error
        self.terminal.type(end, COMMAND_WITHIN_S, INTERRUPTED)
        return output.read_text()

    def _remember(self, printed: str) -> None:
        for token in TOKEN.findall(printed):
            self.token = token.strip("'\"")
        for trace in TRACE.findall(printed):
            self.trace = trace
        for plan in PLAN.findall(printed):
            self.plan = plan

    # -- documents -----------------------------------------------------------------------------------------------------

    def plan_documents(self, block: Snippet, replace: Callable[[str], str]) -> int:
        """Have the region plan them; a part of a document is put into one of a kind that takes it. A file that the page
        names is written first, if it is not there."""
        text = replace(block.text)
        if re.search(OF_OTHERS, text, re.MULTILINE):
            return 0
        path = self.terminal.folder / (block.file or "block.yaml")
        if path.exists():  # beside it, where what it names is found
            path = path.with_name("block.yaml")
        if _DOCUMENT.search(text):
            path.write_text(text)
            printed = self.type_command(f"shoal plan -f {path}")
            documents = list(yaml.safe_load_all(text))
            for one in documents:
                assert one["kind"] != "Workload" or _is_planned(one["metadata"], printed), f"{block.place}: {printed}"
            return len(documents)
        refusals = list[str]()
        for part in yaml.safe_load_all(text):
            spec = part.get("spec", part)
            for kind, around in AROUND.items():
                path.write_text(_document(kind, {**around, **spec}))
                try:
                    self.type_command(f"shoal plan -f {path}")
                except AssertionError as error:
                    refusals.append(str(error))
                else:
                    break
            else:
                raise AssertionError(f"{block.place}: {refusals}")
        return len(list(yaml.safe_load_all(text)))


def _is_planned(metadata: dict[str, str], printed: str) -> bool:
    """Whether the plan says of its replicas where each goes, or that nothing changes."""
    name = f"{metadata.get('tenant', 'default')}/{metadata['name']}"
    return re.search(rf"^({name} +\d of \d placed|nothing to do$)", printed, re.MULTILINE) is not None


def _document(kind: str, spec: dict[str, object]) -> str:
    name = "home" if kind == "Region" else "tried"
    return yaml.safe_dump({"apiVersion": "shoal/v1", "kind": kind, "metadata": {"name": name}, "spec": spec})


def pages() -> list[Path]:
    """README and every page of the docs but the one whose examples are the verbs' own."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page != COMMAND_LINE]
