"""The mistakes of somebody who meets Shoal for the first time, typed as they would type them.

Each answer has to be on standard error, in whole sentences with labels, with the code at its end, and without a word of
Python. Documents with mistakes in them: `test_mistakes.py`, `unit/policies/test_mistakes.py`.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pytest

from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from harness.report import record
from harness.terminal import run_in_terminal, terminal
from shoal.types.codes import Code

ANSWER: Final = re.compile(r"(?P<place>\S+:\d+:\d+: )?found: (.+); wanted: (.+); try: (.+) \((?P<code>[A-Z_]+)\)")
NOISE: Final = re.compile(r"Traceback|Errno|Error\b|Exception|object at 0x|site-packages|\bNone\b")
SHOAL: Final = str(Path(sys.executable).with_name("shoal"))
USAGE_STATUS, REFUSED, INTERRUPTED = 2, 255, 130
PROCESSOR_S: Final = 1.0
"""Of the median command."""
SPENT: Final = list[float]()
"""Processor seconds of each command so far."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A command line with one mistake, and what its answer has to say."""

    # What went wrong, in words.
    name: str
    # After `shoal`; {NAME} stands for a place or a token that the test made.
    command: str
    code: Code
    # Some words of what was found.
    found: str
    # Some words of what can be tried.
    remedy: str
    status: int = REFUSED


MISTAKES: Final = (
    # files
    Mistake("no such file", "apply -f {here}/lost.yaml", Code.SOURCE_UNREACHABLE, "lost.yaml: No such file", "path"),
    Mistake("a model as a document", "apply -f {here}/relu.onnx", Code.YAML_INVALID, "a binary file", "model push"),
    Mistake("a binary file", "validate {here}/binary.yaml", Code.YAML_INVALID, "a binary file", "name a file", 1),
    Mistake("another encoding", "apply -f {here}/latin.yaml", Code.YAML_INVALID, "byte 0xe9", "UTF-8"),
    Mistake("an empty folder", "plan -f {here}/empty", Code.SOURCE_UNREACHABLE, "no .yaml or .yml in", "name a file"),
    Mistake("nothing but a comment", "apply -f {here}/comment.yaml", Code.FIELD_MISSING, "no documents", "policy new"),
    Mistake("of another system", "apply -f {here}/deployment.yaml", Code.KIND_UNKNOWN, "'Deployment'", "Workload"),
    Mistake("twice in a file", "apply -f {here}/twice.yaml", Code.NAME_DUPLICATE, "Policy p again", "rename"),
    Mistake("a file that exists", "support-bundle {here}/comment.yaml", Code.CONFLICT, "File exists", "another name"),
    Mistake("no such folder", "support-bundle {here}/lost/x.tar.gz", Code.CONFLICT, "no folder", "another name"),
    Mistake("nor for a backup", "backup {here}/lost/region", Code.CONFLICT, "no folder", "another name"),
    # units and fields
    Mistake("no unit", "apply -f {here}/unit.yaml", Code.UNIT_MISSING, "'20' without a unit", "like 20ms"),
    Mistake("no unit of a time", "token create --valid 60", Code.UNIT_MISSING, "'60' without a unit", "like 20ms"),
    Mistake("a field mistyped", "apply -f {here}/field.yaml", Code.FIELD_UNKNOWN, "'latancy'", "latency"),
    # names
    Mistake("a verb mistyped", "aply -f x.yaml", Code.USAGE, "'aply'", "shoal apply", USAGE_STATUS),
    Mistake(
        "a name without --name", "model push {here}/relu.onnx relu",
        Code.USAGE, "relu after all that it takes", "push --help", USAGE_STATUS,
    ),
    Mistake("a kind mistyped", "get nods", Code.USAGE, "'nods'", "shoal get nodes", USAGE_STATUS),
    Mistake("no such policy", "plan -f {here}/policy.yaml", Code.POLICY_UNKNOWN, "policy gold", "apply the policy"),
    Mistake("no such model", "plan -f {here}/model.yaml", Code.MODEL_UNKNOWN, "'nothing'", "push FILE --name nothing"),
    Mistake(
        "no such workload", "explain nothing",
        Code.WORKLOAD_UNKNOWN, "no workload default/nothing", "get workloads",
    ),
    Mistake("no such thing", "describe workload nothing", Code.NOT_FOUND, "none of the workloads", "get workloads"),
    Mistake("no such node", "cordon nowhere", Code.NODE_UNKNOWN, "'nowhere'", "shoal get nodes"),
    Mistake(
        "no such device", "migrate served --to plain-cpu/gpu9",
        Code.NOT_FOUND, "'gpu9'", "describe node plain-cpu",
    ),
    Mistake(
        "a name with a space", "model push {here}/relu.onnx --name 'My Model'",
        Code.NAME_INVALID, "'My Model'", "name",
    ),
    # models and tensors
    Mistake("a zip", "model push {here}/packed.onnx", Code.MODEL_ARCHIVE, "a zip archive", "unpack it"),
    Mistake("an empty model", "model push {here}/empty.onnx", Code.MODEL_INVALID, "is empty", "get the file again"),
    Mistake("a document as a model", "model push {here}/unit.yaml", Code.MODEL_INVALID, "not protobuf", ".onnx file"),
    Mistake(
        "another digest", "model push {here}/relu.onnx --digest sha256:" + 64 * "0",
        Code.MODEL_DIGEST, "is sha256:", "again",
    ),
    Mistake(
        "another shape", "infer served --input {here}/shape.npz",
        Code.INVALID_ARGUMENT, "shape [1, 5]", "metadata",
    ),
    Mistake("another type", "infer served --input {here}/type.npz", Code.INVALID_ARGUMENT, "'INT64'", "metadata"),
    Mistake("another input", "infer served --input {here}/name.npz", Code.INVALID_ARGUMENT, "input 'y'", "metadata"),
    # addresses, tokens, roles
    Mistake(
        "the wrong port", "context login --coordinator {link} --token {viewer}",
        Code.COORDINATOR_UNREACHABLE, "link port", "--enrol",
    ),
    Mistake(
        "nobody there", "context login --coordinator 127.0.0.1:1 --token {viewer}",
        Code.COORDINATOR_UNREACHABLE, "refused", "port",
    ),
    Mistake(
        "no port", "context login --coordinator localhost --token {viewer}",
        Code.FIELD_INVALID, "'localhost'", "7443",
    ),
    Mistake(
        "half a token", "context login --coordinator {enrol} --token shoal-join.eu",
        Code.TOKEN_INVALID, "not a join token", "token create",
    ),
    Mistake(
        "no name", "context login --coordinator {enrol} --token {viewer}",
        Code.FIELD_MISSING, "no name of yours", "--as NAME",
    ),
    Mistake(
        "a device's token", "context login --coordinator {enrol} --token {agent} --as me",
        Code.ROLE_DENIED, "role agent", "--role operator",
    ),
    Mistake(
        "the same token again", "context login --coordinator {enrol} --token {used} --as me",
        Code.TOKEN_USED, "redeemed before", "token create",
    ),
    Mistake("a viewer who writes", "cordon plain-cpu --context watcher", Code.ROLE_DENIED, "role viewer", "context"),
    Mistake("another region", "get nodes --region nowhere", Code.REGION_MISMATCH, "region home", "--context"),
    # the command line
    Mistake(
        "an option too early", "--context dev get nodes",
        Code.USAGE, "before the verb", "shoal VERB --context", USAGE_STATUS,
    ),
    Mistake("an option left out", "apply", Code.USAGE, "no -f / --file", "apply --help", USAGE_STATUS),
    Mistake(
        "no such choice", "token create --role admin",
        Code.USAGE, "'admin' for --role", "create --help", USAGE_STATUS,
    ),
    Mistake(
        "neither of two", "migrate served",
        Code.USAGE, "neither --to nor --cancel", "migrate --help", USAGE_STATUS,
    ),
    Mistake("no terminal", "top", Code.USAGE, "no terminal", "shoal status"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody's shell."""

    environment: Mapping[str, str]
    # {NAME} of a command -> what stands for it.
    places: Mapping[str, str]

    def type(self, command: str, **more: str) -> subprocess.CompletedProcess[str]:
        before = sum(os.times()[2:4])
        done = subprocess.run(
            [SHOAL, *shlex.split(command.format(**self.places))], env={**self.environment, **more},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        SPENT.append(sum(os.times()[2:4]) - before)
        return done


@pytest.fixture(scope="module")
def newcomer(stack: DevStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    here = tmp_path_factory.mktemp("here")
    (here / "empty").mkdir()
    contents = {
        "comment": "# later\n",
        "deployment": "apiVersion: shoal/v1\nkind: Deployment\nmetadata: {name: web}\n",
        "twice": documents(policy("p", "  priority: 1\n"), policy("p", "  priority: 2\n")),
        "unit": policy("p", "  require: {latency: {p95: 20}}\n"),
        "field": policy("p", "  require: {latancy: {p95: 20ms}}\n"),
        "policy": workload("w", "relu", "gold"),
        "model": workload("w", "nothing"),
    }
    for name, text in contents.items():
        (here / f"{name}.yaml").write_text(text)
    (here / "latin.yaml").write_bytes("# caf\xe9\n".encode("latin-1"))
    (here / "binary.yaml").write_bytes(bytes(range(256)))
    (here / "relu.onnx").write_bytes((stack.folder / "relu.onnx").read_bytes())
    (here / "packed.onnx").write_bytes(b"PK\x03\x04 and so on")
    (here / "empty.onnx").touch()
    np.savez(here / "shape.npz", x=np.zeros((1, 5), np.float32))
    np.savez(here / "type.npz", x=np.zeros((1, 4), np.int64))
    np.savez(here / "name.npz", y=np.zeros((1, 4), np.float32))
    stack.apply(documents(policy("served", on_nodes(["plain-cpu"])), workload("served", "relu", "served")))
    stack.wait_serving("served")
    with stack.api() as api:
        tokens = {role: api.create_token(role, "", 600.0).token for role in ("viewer", "agent")}
        used = api.create_token("viewer", "", 600.0).token
    places = {
        **tokens,
        "used": used,
        "here": str(here),
        "link": stack.info.stack.coordinator_addresses("link"),
        "enrol": stack.info.stack.coordinator_addresses("enrol"),
    }
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    home = {"SHOAL_HOME": str(stack.contexts.folder), "SHOAL_DEV_DIR": str(stack.control.folder), "COLUMNS": "300"}
    found = Newcomer({**plain, **home}, places)
    assert found.type("context login --coordinator {enrol} --token {used} --as me --name watcher").returncode == 0
    assert found.type("context use dev").returncode == 0
    yield found
    stack.delete_workloads("served")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_a_mistake_gets_an_answer_that_helps(newcomer: Newcomer, mistake: Mistake) -> None:
    done = newcomer.type(mistake.command)
    on, other = (done.stdout, done.stderr) if mistake.command.startswith("validate") else (done.stderr, done.stdout)
    assert (done.returncode, other) == (mistake.status, "")
    answer = ANSWER.fullmatch(on.splitlines()[-1])
    assert answer is not None, on
    assert answer["code"] == mistake.code
    assert mistake.found in answer[2], on
    assert mistake.remedy in answer[4], on
    assert not NOISE.search(on), on


def test_nobody_is_known_yet(newcomer: Newcomer, tmp_path: Path) -> None:
    done = newcomer.type("status", SHOAL_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert "wanted: a region to talk to" in done.stderr
    assert "try: shoal dev up, or shoal context login" in done.stderr


def test_a_full_disk_is_named_whatever_is_written(newcomer: Newcomer) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [SHOAL, "get", "nodes"], env=newcomer.environment, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == REFUSED
    assert done.stderr.startswith("found: output: No space left on device; ")
    assert done.stderr.endswith("(DISK_FULL)\n")


def test_a_reader_who_has_seen_enough_gets_no_complaint(newcomer: Newcomer) -> None:
    command = f"{shlex.quote(SHOAL)} get nodes -o json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], env=newcomer.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


@pytest.mark.parametrize("columns", [40, 60])
def test_a_narrow_terminal_breaks_between_words_alone(newcomer: Newcomer, columns: int) -> None:
    refused = run_in_terminal(columns, SHOAL, "explain", "nothing", environment=newcomer.environment)
    text = [line for line in refused.lines if line]
    assert refused.status == REFUSED
    assert [line.partition(":")[0] for line in text if not line.startswith(" ")] == ["found", "wanted", "try"]
    assert text[-1].endswith("(WORKLOAD_UNKNOWN)")
    listed = run_in_terminal(columns, SHOAL, "get", "all", environment=newcomer.environment)
    assert listed.status == 0
    assert [line for line in (*text, *listed.lines) if len(line) > columns] == []


def test_ctrl_c_ends_a_watch_at_once_and_without_a_word(newcomer: Newcomer) -> None:
    watched = run_in_terminal(
        100, SHOAL, "get", "nodes", "--watch", environment=newcomer.environment, interrupt_at="plain-cpu"
    )
    assert watched.status == INTERRUPTED
    assert not any(NOISE.search(line) for line in watched.lines), watched.lines


def test_top_is_drawn_in_80_columns_and_its_keys_are_heard(newcomer: Newcomer) -> None:
    with terminal((SHOAL, "top"), newcomer.environment, columns=80) as window:
        window.expect("default/served")
        window.type("1")
        window.expect("plain-cpu")
        window.type("q")
        window.read_to_end()
        assert window.status() == 0
    assert not NOISE.search(window.shown), window.shown


def test_the_answers_came_at_once_and_left_nothing(newcomer: Newcomer) -> None:
    nodes = newcomer.type("get nodes -o name").stdout.split()
    assert nodes == ["node/edge-npu", "node/gateway", "node/plain-cpu"]
    assert len(MISTAKES) >= 28
    record(
        "issue 23, point 5", "P", 1, mistakes=len(MISTAKES) + 6, commands=len(SPENT),
        processor_s_median=round(median(SPENT), 2), processor_s_max=round(max(SPENT), 2),
    )  # fmt: skip
    assert median(SPENT) < PROCESSOR_S
