"""Commands that need no server: exit statuses, messages, files."""

import errno
import hashlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import grpc
import pytest
from click.shell_completion import ShellComplete

from shoal.cli.documents import read
from shoal.cli.examples import EXAMPLES
from shoal.cli.main import main, shoal
from shoal.cli.modelfiles import model_name
from shoal.cli.names import COMPLETION_S
from shoal.cli.verbs import GROUPS
from shoal.client import Context, Contexts, RegionClient
from shoal.client.connection import LeaderConnection
from shoal.client.transfers import digest_of
from shoal.devstack import layout
from shoal.devstack.scale import Rate, time_scale
from shoal.types.code_help import CODE_HELP
from shoal.types.codes import Code, ShoalError
from shoal.types.identity import check_name
from shoal.v1 import nouns_pb2, operator_pb2
from shoal.wire.limits import MODEL_BYTES


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHOAL_HOME": str(home), "SHOAL_DEV_DIR": str(home / "dev")}
    command = [sys.executable, "-m", "shoal.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def test_a_mistake_is_placed_and_the_status_is_1(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: x}\nspec:\n  optimise: {energy: 1}\n")
    done = run("validate", str(file), home=tmp_path)
    assert done.returncode == 1
    assert f"{file}:5:3: found: " in done.stdout
    assert "(FIELD_UNKNOWN)" in done.stdout
    assert "optimize" in done.stdout
    data = json.loads(run("validate", str(file), "-o", "json", home=tmp_path).stdout)
    assert data["valid"] is False
    assert data["problems"][0]["line"] == 5


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("get", "nodes"), "CONTEXT_UNKNOWN"),
        (("dev", "status"), "NOT_FOUND"),
        (("dev", "up", "--federation-replicas", "2"), "FIELD_INVALID"),
        (("validate", "no-such-file.yaml"), "SOURCE_UNREACHABLE"),
        (("context", "use", "nowhere"), "CONTEXT_UNKNOWN"),
        (("context", "login", "--coordinator", "127.0.0.1:1", "--token", "junk"), "TOKEN_INVALID"),
        (("token", "create", "--valid", "60"), "UNIT_MISSING"),
        (("rollback", "reader"), "CONTEXT_UNKNOWN"),
        (("node", "measure", "edge"), "CONTEXT_UNKNOWN"),
        (("region", "measurements", "export"), "CONTEXT_UNKNOWN"),
        (("region", "measurements", "import", "no-such-file.json"), "SOURCE_UNREACHABLE"),
        (("region", "measurements", "rm", "eu"), "CONTEXT_UNKNOWN"),
        (("upgrade", "--to", "0.2.0"), "CONTEXT_UNKNOWN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_errors_are_one_coded_line(arguments: tuple[str, ...], code: str, tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 255
    assert done.stderr.startswith("found: ")
    assert done.stderr.endswith(f" ({code})\n")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "gnomes"),
        ("dance",),
        ("apply",),
        ("plan", "--nope"),
        ("delete",),
        ("delete", "workload"),
        ("delete", "workload", "reader", "-f", "reader.yaml"),
        ("migrate", "reader"),
        ("events", "--limit", "some"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_has_a_code_of_its_own(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """It is no field of a document that is wrong."""
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(" (USAGE)\n")
    assert len(done.stderr.splitlines()) == 1
    assert f"shoal {arguments[0] if arguments != ('dance',) else '--help'}" in done.stderr
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "found", "remedy"),
    [
        (("get", "nod"), "no kind is called 'nod'", "shoal get nodes, or "),
        (("aply",), "no verb is called 'aply'", "shoal apply, or "),
        (("--context", "dev", "get", "nodes"), "--context before the verb", "shoal VERB --context .."),
    ],
    ids=str,
)
def test_a_mistyped_word_gets_the_nearest_one(
    arguments: tuple[str, ...], found: str, remedy: str, tmp_path: Path
) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"found: {found}; wanted: ")
    assert f"try: {remedy}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("get",), 2, "found: no KIND; wanted: shoal get [OPTIONS] KIND [NAME]...; try: "),
        (("get", "nodes", ""), 2, "an empty name"),
        (("infer", "", "--input", "x.npz"), 2, "an empty name"),
        (("policy", "new", "--template", "cheapest", "--set", "p95=abc"), 255, "--set p95: 'abc'"),
        (("policy", "new", "--template", "cheapest", "--set", "p95=50"), 255, "without a unit; wanted: a duration"),
    ],
    ids=str,
)
def test_an_answer_says_what_it_wanted(arguments: tuple[str, ...], status: int, said: str, tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_whose_reader_has_gone_is_not_a_no(unbuffered: str, tmp_path: Path) -> None:
    """Before, a table into a closed pipe ended with status 1, as a no does, or with the interpreter's own 120."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", "context", "ls"],
            env={**os.environ, "SHOAL_HOME": str(tmp_path), "PYTHONUNBUFFERED": unbuffered},
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_text_that_the_output_cannot_write_is_not_the_words_fault(tmp_path: Path) -> None:
    """Before, a good word was called no UTF-8."""
    environment = {**os.environ, "SHOAL_HOME": str(tmp_path), "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"}
    words = ["policy", "new", "--template", "cheapest", "--set", "model=models/\u2192.onnx"]
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 255
    assert done.stderr.startswith("found: an output in latin-1, which has no '\\u2192'")
    assert done.stderr.strip().endswith("(USAGE)")
    assert done.stdout == ""


def test_a_word_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def send(**_: object) -> None:
        operator_pb2.MigrateRequest(to=os.fsdecode(b"edge-\xff")).SerializeToString()

    monkeypatch.setattr("shoal.cli.main.shoal", send)
    monkeypatch.setattr("sys.argv", ["shoal"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 255
    assert "'edge-\\udcff', which is no UTF-8" in capsys.readouterr().err


def test_a_command_without_a_standard_output_does_its_work(tmp_path: Path) -> None:
    """Before, it was INTERNAL: AttributeError."""
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -c "from shoal.cli.main import main; main()" context ls >&-', sys.executable],
        env={**os.environ, "SHOAL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_this_user_may_not_read_is_not_at_the_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("kind: Policy\n")

    def deny(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ShoalError) as caught:
        read([str(file)])
    assert caught.value.refusal.remedy == "let this user read it"


def test_problems_of_files_are_data_if_data_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("kind: Policy\n")
    for verb in ("plan", "apply"):
        done = run(verb, "-f", str(tmp_path / "bad.yaml"), "-o", "json", home=tmp_path)
        assert (done.returncode, done.stderr) == (255, "")
        assert json.loads(done.stdout)["problems"][0]["refusal"]["code"]


def test_shoal_alone_lists_every_verb_under_a_heading(tmp_path: Path) -> None:
    done = run(home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Examples:" in done.stdout
    for name in shoal.list_commands(click.Context(shoal)):
        assert len(re.findall(rf"^  {name} ", done.stdout, re.MULTILINE)) == 1, name
    assert run("--help", home=tmp_path).stdout == done.stdout
    group = run("dev", home=tmp_path)
    assert (group.returncode, group.stderr) == (0, "")
    assert "status" in group.stdout


def test_the_version_is_told_without_a_region(tmp_path: Path) -> None:
    done = run("version", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"shoal +\d+\.\d+\.\d+\S*\n", done.stdout)
    assert run("--version", home=tmp_path).stdout.split() == done.stdout.split()
    told = json.loads(run("version", "-o", "json", home=tmp_path).stdout)
    assert (told["client"], told["region"]) == (done.stdout.split()[1], None)


def test_a_code_is_explained_without_a_region(tmp_path: Path) -> None:
    done = run("explain", "MEMORY_SHORT", "-o", "json", home=tmp_path)
    assert done.returncode == 0
    help_text = CODE_HELP[Code.MEMORY_SHORT]
    assert json.loads(done.stdout) == {"code": "MEMORY_SHORT", "cause": help_text.cause, "cure": help_text.cure}
    wrong = run("explain", "MEMORY_SHRT", home=tmp_path)
    assert wrong.returncode == 255
    assert "try: shoal explain MEMORY_SHORT (USAGE)" in wrong.stderr


def test_a_file_without_documents_is_no_valid_one(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    done = run("validate", str(tmp_path / "empty.yaml"), home=tmp_path)
    assert done.returncode == 255
    assert done.stderr.endswith(" (FIELD_MISSING)\n")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "YAML_INVALID"),
        (b"\x08\x07\x12\x00\x00ONNX", "YAML_INVALID"),
        (b"a: " + b"x" * (1 << 20), "YAML_TOO_LARGE"),
    ],
    ids=["bytes", "no text", "large"],
)
def test_a_file_that_is_no_text_is_named_with_a_code(content: bytes, code: str, tmp_path: Path) -> None:
    """Alone, and in a folder beside a sound one."""
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "sub.yaml").mkdir()
    (folder / "good.yaml").write_text("apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: mild}\n")
    (folder / "bad.yaml").write_bytes(content)
    for named in (folder / "bad.yaml", folder):
        done = run("validate", str(named), home=tmp_path)
        assert (done.returncode, done.stderr) == (1, "")
        (said,) = done.stdout.splitlines()
        assert said.startswith(f"{folder / 'bad.yaml'}:1:")
        assert said.endswith(f"({code})")
    assert run("apply", "-f", str(folder), home=tmp_path).stderr.startswith(f"{folder / 'bad.yaml'}:1:")


def test_a_model_beyond_the_limit_is_refused_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without blocks: not even hashed."""
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(MODEL_BYTES + 1)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ShoalError) as refused:
        digest_of(path)
    assert refused.value.code is Code.MODEL_TOO_LARGE
    assert str(path) in refused.value.refusal.found
    with pytest.raises(ShoalError):
        digest_of(path, 10)
    monkeypatch.undo()
    (tmp_path / "small").write_bytes(b"12345678901")
    with pytest.raises(ShoalError):
        digest_of(tmp_path / "small", 10)
    assert digest_of(tmp_path / "small", 11)[1] == 11


@pytest.mark.parametrize(("file", "expected"), [("My Model_v2.onnx", "my-model-v2"), (f"{'a' * 62}_b.onnx", "a" * 62)])
def test_the_name_of_a_file_becomes_a_valid_name_of_a_model(file: str, expected: str) -> None:
    assert check_name(model_name(Path(file)), "model") == expected


def every_verb(group: click.Group = shoal, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """(verb with those above it, command)"""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from every_verb(command, (*path, name))


def test_every_verb_has_help_with_examples_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "of the examples that take one")
    verbs = dict(every_verb())
    assert verbs.keys() == EXAMPLES.keys()
    for path, command in verbs.items():
        assert command.help, path
        shown = command.get_help(
            click.Context(command, info_name=f"shoal {path}", terminal_width=80, max_content_width=80)
        )
        assert max(map(len, shown.splitlines())) <= 80, shown
        for line, what in EXAMPLES[path]:
            assert line in shown, path
            assert what in shown, path
            words = shlex.split(line.partition("$(")[2].rstrip(')"') or line.partition(" >")[0])
            words = words[words.index("shoal") + 1 :]
            found: click.Command | None = shoal
            inner = click.Context(shoal)
            while isinstance(found, click.Group) and words and not words[0].startswith("-"):
                _, found, words = found.resolve_command(inner, words)
            assert found is not None, line
            assert found.make_context("it", list(words)), line


def test_a_shell_gets_kinds_contexts_and_names_of_the_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    Contexts().save(Context("dev", "home", "127.0.0.1:1", str(tmp_path)))
    asked = list[tuple[str, str]]()

    class Region(RegionClient):
        def __init__(self, context: Context, within_s: float = math.inf) -> None:
            assert within_s <= COMPLETION_S
            asked.append((context.name, ""))

        def close(self) -> None: ...

        def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
            asked.append(("", kind))
            nodes = [nouns_pb2.Node(name=name) for name in ("edge-npu", "edge-2", "shop")]
            return operator_pb2.GetReply(nodes=[operator_pb2.NodeView(node=node) for node in nodes])

        def federation(self) -> operator_pb2.FederationView:
            return operator_pb2.FederationView(members=[operator_pb2.MemberView(region="shore")])

    monkeypatch.setattr("shoal.client.RegionClient", Region)

    def complete(*words: str) -> list[str]:
        return [
            each.value for each in ShellComplete(shoal, {}, "shoal", "_").get_completions(list(words[:-1]), words[-1])
        ]

    assert complete("get", "no") == ["nodes"]
    assert complete("comp") == ["completion"]
    assert complete("context", "use", "d") == ["dev"]
    assert asked == []
    assert complete("get", "node", "edge") == ["edge-npu", "edge-2"]
    assert complete("drain", "") == ["edge-npu", "edge-2", "shop"]
    assert ("", "nodes") in asked
    assert complete("get", "no/edge-n") == ["no/edge-npu"]
    assert complete("get", "node/shop", "node/edge") == ["node/edge-npu", "node/edge-2"]
    assert complete("get", "node/shop", "e") == [], "no name without its kind"
    asked.clear()
    assert complete("migrate", "reader", "--to", "s") == ["shop", "shore"]
    assert asked == [("dev", ""), ("", "nodes"), ("", "devices")], "over one connection"
    assert complete("get", "devices,no") == ["devices,nodes"]
    assert complete("get", "a") == ["agreements", "all"]
    assert complete("migrate", "reader", "--to", "s") == ["shop", "shore"]
    assert complete("get", "nodes", "-o", "js") == ["json", "jsonpath="]
    monkeypatch.setattr(Region, "get", lambda *_: 1 / 0)
    monkeypatch.setattr(Region, "federation", lambda *_: 1 / 0)
    assert complete("get", "no/") == []
    assert complete("get", "nonsense/") == []
    assert complete("migrate", "reader", "--to", "s") == []
    assert complete("drain", "e") == []


def test_a_line_of_the_help_is_short_and_says_what_for() -> None:
    for verbs in GROUPS.values():
        for verb in verbs:
            assert 10 < len(verb.summary) <= 60, verb.name
            assert not verb.summary.endswith("."), verb.name


@pytest.mark.parametrize(
    "arguments", [("--help",), ("get", "--help"), ("version",), ("completion", "bash")], ids=" ".join
)
def test_what_is_wanted_at_once_imports_no_large_library(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """They took half a second each time."""
    large = {"grpc", "google.protobuf", "numpy", "pydantic", "cryptography", "yaml", "asyncio", "psutil", "onnx"}
    if arguments == ("get", "--help"):
        large -= {"grpc", "google.protobuf", "cryptography", "asyncio"}
    script = (
        "import sys; from shoal.cli.main import main\ntry: main()\n"
        f"except SystemExit: print(*sorted({large!r} & sys.modules.keys()), file=sys.stderr)"
    )
    environment = {**os.environ, "SHOAL_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr.strip() == ""
    assert done.stdout


def test_contexts_are_kept_and_private(tmp_path: Path) -> None:
    contexts = Contexts(tmp_path / "home")
    for name in ("one", "two"):
        contexts.save(Context(name, "home", "127.0.0.1:1", str(tmp_path)))
    assert contexts.current == "two"
    assert contexts.use("one").name == "one"
    contexts.remove("one")
    assert [context.name for context in contexts.all()] == ["two"]
    assert contexts.current == "two"
    assert (tmp_path / "home" / "contexts.json").stat().st_mode & 0o777 == 0o600


def test_a_broken_context_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "contexts.json").write_text("{")
    with pytest.raises(ShoalError) as caught:
        Contexts(tmp_path).get()
    assert caught.value.code is Code.STATE_CORRUPT


def test_the_scale_lets_the_host_meet_the_fastest_device() -> None:
    host = Rate(50e9, is_emulated=False)
    assert time_scale([host], 2) == 1.0
    scale = time_scale([host, Rate(25e12, is_emulated=True), Rate(1e12, is_emulated=True)], 2)
    assert scale >= 25e12 / 50e9
    slow_to_launch = time_scale([host, Rate(25e12, is_emulated=True, launch_s=1.0)], 2)
    assert slow_to_launch == 5.0, "the smallest: the largest model takes this host 0.2 s"
    crowd = [Rate(25e12, is_emulated=True)] * 8
    assert time_scale([host, *crowd], 2) >= 4 * 25e12 / 50e9
    with pytest.raises(ValueError, match="host"):
        time_scale([Rate(1e12, is_emulated=True)], 2)


def test_a_stack_is_the_same_when_read_back(tmp_path: Path) -> None:
    ports = {name: 20_000 + index for index, name in enumerate(layout.port_names(layout.StackOptions(agents=6)))}
    stack = layout.compose(layout.StackOptions(agents=6), ports)
    layout.save(tmp_path, stack)
    assert layout.load(tmp_path) == stack
    assert [agent.name for agent in stack.agents][-2:] == ["plain-cpu-2", "plain-cpu-3"]
    assert len({address for member in stack.members for address in member.addresses.values()}) == len(ports)


def test_regions_of_one_stack_have_members_and_ports_of_their_own() -> None:
    asked = layout.StackOptions(agents=2, link="mqtt", regions=3, federation=1)
    names = layout.port_names(asked)
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(names)})
    assert layout.StackOptions.from_stack(stack) == asked
    assert stack.regions == ("home", "home-2", "home-3")
    assert len({member.name for member in stack.members}) == len(stack.members)
    assert [member.name for member in stack.for_region("home").members] == [
        "broker", "coordinator", "gateway", "plain-cpu", "edge-npu",
    ]  # fmt: skip
    second = stack.for_region("home-2")
    assert second.coordinator.name == "home-2-coordinator"
    assert second.coordinator.addresses.keys() >= {"link", "models", "peers"}
    assert [member.role for member in stack.federation] == ["federation"]


@pytest.mark.parametrize(
    "asked",
    [
        layout.StackOptions(regions=0),
        layout.StackOptions(federation=2),
        layout.StackOptions(coordinators=3),
        layout.StackOptions(agents=65),
    ],
)
def test_a_stack_that_is_not_to_be_had(asked: layout.StackOptions) -> None:
    with pytest.raises(ShoalError) as refused:
        layout.port_names(asked)
    assert refused.value.refusal.remedy


@pytest.mark.parametrize(
    ("status", "details", "found"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote "
            "host: Connection refused",
            "127.0.0.1:9: failed to connect: Connection refused",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "127.0.0.1:9: Socket closed"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "127.0.0.1:9 does not have what was called"),
    ],
)
def test_what_grpc_says_is_told_in_a_line_with_a_remedy(
    status: grpc.StatusCode, details: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailedCall(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return status

        def details(self) -> str:
            return details

        def trailing_metadata(self) -> tuple[()]:
            return ()

    monkeypatch.setattr("shoal.client.connection.check_own", lambda *_: None)
    monkeypatch.setattr("shoal.client.connection.check_peer", lambda *_: None)
    for name in ("ca.pem", "key.pem", "cert.pem"):
        (tmp_path / name).write_bytes(b"-")
    refusal = LeaderConnection(Context("dev", "home", "127.0.0.1:9", str(tmp_path))).error_of(FailedCall(), 0.1).refusal
    assert refusal.found == found
    assert "the context's address is" in refusal.remedy


def test_an_unknown_context_leads_to_the_list_of_them(tmp_path: Path) -> None:
    known = [Context(f"c{number}", "home", "127.0.0.1:1", str(tmp_path / f"c{number}")) for number in range(9)]
    for each in known:
        Contexts(tmp_path).save(each, use=False)
    done = run("get", "nodes", "--context", "nowhere", home=tmp_path)
    assert done.stderr == (
        "found: no context 'nowhere'; wanted: one of c0, c1, c2, c3, c4, ..; try: shoal context ls (CONTEXT_UNKNOWN)\n"
    )


@pytest.mark.parametrize("access", ["read", "write"])
def test_contexts_of_another_user_say_whose_they_are(
    access: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`choose another path` was the advice, of a path that nobody had chosen."""
    contexts = Contexts(tmp_path)
    contexts.save(Context("dev", "home", "127.0.0.1:1", str(tmp_path / "dev")))

    def deny(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if access == "read":
        monkeypatch.setattr(Path, "read_text", deny)
    else:
        monkeypatch.setattr("shoal.client.contexts.write_private", deny)
    with pytest.raises(ShoalError) as error:
        contexts.use("dev")
    assert error.value.refusal.found == f"{tmp_path / 'contexts.json'}: Permission denied"
    assert "SHOAL_HOME" in error.value.refusal.remedy


def test_no_documents_on_standard_input_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ShoalError) as error:
        read(["-"])
    assert error.value.refusal.found == "no documents in standard input"


def test_an_error_of_a_command_that_was_asked_for_json_is_json(tmp_path: Path) -> None:
    for words in (["-o", "json"], ["-ojson"], ["--output=json"]):
        done = run("get", "nodes", *words, home=tmp_path)
        assert done.returncode == 255
        error = json.loads(done.stderr)["error"]
        assert error["code"] == "CONTEXT_UNKNOWN"
        assert error["found"] == "no context is in use"
        assert set(error) == {"code", "found", "wanted", "try"}
