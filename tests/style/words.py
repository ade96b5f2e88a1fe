"""What a stranger can read: `make words`, part of `make lint`.

Checks, over the tree that it stands in: names of functions and methods (no bare participle), names of public classes
(one definition in each part), names of modules, classes and functions (no word of a private vocabulary), fields of
dataclasses (each with a comment above it, from five fields on), sentences and lines of the documentation. Prints how
many of each it looked at and what it found, one a line; exit status 1 when there is any.

`allowed.toml` beside this file lists the exceptions, each with its reason; one that is not needed is an error too.
With an argument only that is checked: `names`, `fields` or `prose`.
"""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("protos", "policies", "agents", "coordinator", "cli", "simulator")
NAMED: Final = (*PARTS, "benchmarks", "deploy", "tests")
FIELDS: Final = 5
SENTENCE_WORDS: Final = 40
COLUMNS: Final = 120
CHECKS: Final[Mapping[str, tuple[str, ...]]] = {
    "names": ("bare participle", "class defined twice", "private word"),
    "fields": ("undocumented field",),
    "prose": ("long line", "long sentence"),
}

# Participles that do not end in -ed. Those that are also a verb's plain form (read, set, put) are none.
IRREGULAR: Final = frozenset(
    re.findall(
        r"\w+",
        "begun born borne bought bound broken brought built caught chosen come dealt done drawn driven dug fallen "
        "fed felt forgiven forgotten fought found given gone gotten grown heard held hidden hung kept known laid "
        "learnt led left lent lit lost made meant met paid ridden risen said seen sent shaken shot shown slept sold "
        "sought spent spoken spun stolen stood struck stuck sunk swept sworn taken taught thought thrown told torn "
        "understood undone withdrawn withheld woken won worn written",
    )
)
NO_PARTICIPLE: Final = frozenset(("bed", "embed", "exceed", "feed", "need", "proceed", "red", "seed", "shed", "speed"))

# Words that only this project used for what the field has a word for; each with that word.
WORDS: Final[Mapping[str, str]] = {
    "apart": "netns cluster",
    "asking": "request correlation",
    "beat": "heartbeat",
    "blinded": "link lost",
    "blow": "fault",
    "books": "allocations",
    "brought": "realised",
    "calm": "warm-up baseline",
    "came": "actual",
    "chance": "rng",
    "condemned": "blocked",
    "course": "state of a cross-region migration",
    "courtesy": "scheduling priority",
    "crew": "fleet",
    "crossed": "cross-region migration",
    "crossing": "cross-region migration",
    "crowd": "co-located requests",
    "deal": "agreement",
    "deliver": "uncancelled",
    "dice": "rng",
    "errand": "call context",
    "finish": "uncancelled",
    "flight": "in-flight request",
    "following": "follower",
    "forgiven": "cleared",
    "garbage": "gc freeze",
    "giver": "handover source",
    "greeted": "restored-store detection",
    "hear": "verify",
    "herd": "reconnect storm",
    "home": "local region",
    "hoped": "expected",
    "judge": "checker, liveness",
    "keeper": "process supervisor, stateful replica",
    "lent": "guest models",
    "lodged": "guest models",
    "outlook": "delegation preview",
    "past": "restored-store detection",
    "patience": "watchdog, keepalive",
    "prospects": "can-move query",
    "road": "connection",
    "roads": "link shaping",
    "said": "signed envelope",
    "seats": "API stub",
    "sighted": "link restored",
    "sighting": "observation",
    "sights": "observations",
    "story": "scenario",
    "sweep": "seeds",
    "taker": "handover target",
    "told": "last report",
    "trio": "three-coordinator cluster",
    "trouble": "faults, failures",
    "truth": "region record, fencing",
    "turned": "last refusals",
    "twins": "duplicate identity",
    "undated": "TLS without date checks",
    "unmoved": "reasons to stay",
    "victim": "bystander",
    "wish": "delegation demand",
    "witness": "verification source",
}


@dataclass(frozen=True, slots=True)
class Finding:
    path: str
    line: int
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.check}: {self.text}"


def tokens(name: str) -> list[str]:
    """`on_hello` and `OnHello` alike: ["on", "hello"]."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in NO_PARTICIPLE)


def is_bare_participle(name: str) -> bool:
    """`held`, `held_by`, `told_of`: one form for events, updates, predicates and readings. `is_held` is none, nor is
    an adjective before its noun (`expected_latency`)."""
    words = name.split("_")
    return is_participle(words[0]) and (
        len(words) == 1 or words[1] in ("as", "at", "by", "for", "from", "in", "of", "to")
    )


def private_word(name: str) -> str:
    """`in_flight` is the field's word, `flight` alone is not."""
    words = tokens(re.sub(r"in_?flight", "", name, flags=re.IGNORECASE))
    return next((word for word in words if word in WORDS), "")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each).split("(")[0].split(".")[-1] == "dataclass" for each in node.decorator_list)


def fields_without_comment(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """Names of a dataclass's fields that have no comment on the line above, if it has FIELDS of them or more."""
    found = [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not ast.unparse(each.annotation).startswith("ClassVar")
    ]
    if len(found) < FIELDS:
        return []
    return [ast.unparse(each.target) for each in found if not lines[each.lineno - 2].lstrip().startswith("#")]


def check_names(path: str, tree: ast.Module) -> Iterator[Finding]:
    stem = Path(path).stem
    if word := private_word(stem):
        yield Finding(path, 1, "private word", f"module {stem}: {word} is {WORDS[word]}")
    for function in functions(tree):
        if not function.name.startswith("_") and is_bare_participle(function.name):
            yield Finding(path, function.lineno, "bare participle", function.name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("test")
            and (word := private_word(node.name))
        ):
            yield Finding(path, node.lineno, "private word", f"{node.name}: {word} is {WORDS[word]}")


def check_fields(path: str, tree: ast.Module, lines: list[str]) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_dataclass(node):
            for name in fields_without_comment(node, lines):
                yield Finding(path, node.lineno, "undocumented field", f"{node.name}.{name}")


def check_classes(trees: Mapping[str, ast.Module]) -> Iterator[Finding]:
    """Public class names at the top of more than one module of a part."""
    defined: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for path, tree in trees.items():
        part = "/".join(Path(path).parts[: 2 if path.startswith("tests/") else 1])
        if part in PARTS or part == "tests/harness":
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    defined[part, node.name].append((path, node.lineno))
    for (_, name), places in defined.items():
        for path, line in places[1:]:
            yield Finding(path, line, "class defined twice", f"{name}, also in {places[0][0]}")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs of Markdown and the lines that they begin at, without code, tables, headings and links' addresses."""
    paragraph: list[str] = []
    begin, is_code = 1, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fence = line.lstrip().startswith("```")
        is_code ^= fence
        item = re.match(r"\s*(?:[-*]|\d+\.)\s+", line)
        if fence or is_code or not line.strip() or line.lstrip().startswith(("#", "|", "<")) or item:
            if paragraph:
                yield begin, " ".join(paragraph)
            paragraph, begin = [], number
            if item and not is_code:
                paragraph = [line[item.end() :]]
        elif not is_code:
            begin = begin if paragraph else number
            paragraph.append(line.strip())


def sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", paragraph))
    return re.split(r"(?<=[.!?:;])\s+(?=[A-Z\[`\"(*]|code)", plain)


def check_prose(path: str, text: str) -> Iterator[Finding]:
    """Tables have no line breaks in Markdown, so that their rows may be long."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > COLUMNS and not line.lstrip().startswith("|"):
            yield Finding(path, number, "long line", f"{len(line)} columns")
    for number, paragraph in prose(text):
        for sentence in sentences(paragraph):
            if (count := len(sentence.split())) > SENTENCE_WORDS:
                yield Finding(path, number, "long sentence", f"{count} words: {sentence[:60]} ..")


def look(root: Path) -> tuple[list[Finding], Counter[str]]:
    """Everything that is found, and how many of each kind were looked at."""
    found: list[Finding] = []
    seen: Counter[str] = Counter()
    trees: dict[str, ast.Module] = {}
    for part in NAMED:
        for file in sorted((root / part).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if "_pb2" in path or "/build/" in path:
                continue
            text = file.read_text()
            trees[path] = tree = ast.parse(text)
            found += check_names(path, tree)
            seen["functions"] += sum(1 for _ in functions(tree))
            if part != "tests" or path.startswith("tests/harness"):
                found += check_fields(path, tree, text.split("\n"))
                seen["dataclasses"] += sum(isinstance(n, ast.ClassDef) and is_dataclass(n) for n in ast.walk(tree))
    found += check_classes(trees)
    seen["modules"] = len(trees)
    seen["classes"] = sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in ast.walk(tree))
    for file in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]):
        found += check_prose(file.relative_to(root).as_posix(), file.read_text())
        seen["pages"] += 1
    return found, seen


def main() -> int:
    only = sys.argv[1:]
    if not set(only) <= set(CHECKS):
        sys.exit(f"found: {' '.join(only)}; wanted: {', '.join(CHECKS)}, or nothing for all")
    allowed: Mapping[str, str] = tomllib.loads((Path(__file__).parent / "allowed.toml").read_text())["names"]
    found, seen = look(ROOT)
    found = [each for each in found if not only or any(each.check in CHECKS[part] for part in only)]
    used = {name for name in allowed for each in found if each.text.split(":")[0] == name}
    left = [each for each in found if each.text.split(":")[0] not in allowed]
    for each in left:
        print(each)
    unused = set() if only and "names" not in only else set(allowed) - used
    for name in sorted(unused):
        print(f"allowed.toml: {name} is not needed")
    counts = Counter(each.check for each in left)
    print(", ".join(f"{count} {what}" for what, count in seen.items()), end="; ")
    print(f"{len(used)} exceptions with a reason; ", end="")
    print(", ".join(f"{count} of {check}" for check, count in counts.items()) or "nothing found")
    return 1 if left or unused else 0


if __name__ == "__main__":
    sys.exit(main())
