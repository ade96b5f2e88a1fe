"""Commands that need no server: exit statuses, messages, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import shoal
from shoal.client import Context, Contexts
from shoal.devstack import layout
from shoal.devstack.scale import Rate, time_scale
from shoal.types.codes import Code, ShoalError


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHOAL_HOME": str(home), "SHOAL_DEV_DIR": str(home / "dev")}
    command = [sys.executable, "-m", "shoal.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def test_a_mistake_is_placed_and_the_status_is_1(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: x}\nspec:\n  optimise: {energy: 1}\n")
    done = run("validate", str(file), home=tmp_path)
    assert done.returncode == 1
    assert f"{file}:5:3  FIELD_UNKNOWN" in done.stdout
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
        (("token", "create", "--valid", "60"), "CONTEXT_UNKNOWN"),
        (("rollback", "reader"), "CONTEXT_UNKNOWN"),
        (("upgrade", "--to", "0.2.0"), "CONTEXT_UNKNOWN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_errors_are_one_coded_line(arguments: tuple[str, ...], code: str, tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 255
    assert done.stderr.startswith(f"{code}  ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("get", "gnomes"), ("dance",), ("apply",), ("plan", "--nope")])
def test_a_wrong_command_line_is_coded_too(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("FIELD_INVALID  ")
    assert "--help" in done.stderr


def test_a_file_without_documents_is_no_valid_one(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    done = run("validate", str(tmp_path / "empty.yaml"), home=tmp_path)
    assert done.returncode == 255
    assert done.stderr.startswith("FIELD_MISSING  ")


def test_every_verb_has_help() -> None:
    for name, command in shoal.commands.items():
        assert command.help, name
        for sub, inner in getattr(command, "commands", {}).items():
            assert inner.help, f"{name} {sub}"


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
    host = Rate(50e9, emulated=False)
    assert time_scale([host], 2) == 1.0
    scale = time_scale([host, Rate(25e12, emulated=True), Rate(1e12, emulated=True)], 2)
    assert scale >= 25e12 / 50e9
    crowd = [Rate(25e12, emulated=True)] * 8
    assert time_scale([host, *crowd], 2) >= 4 * 25e12 / 50e9
    with pytest.raises(ValueError, match="host"):
        time_scale([Rate(1e12, emulated=True)], 2)


def test_a_stack_is_the_same_when_read_back(tmp_path: Path) -> None:
    ports = {name: 20_000 + index for index, name in enumerate(layout.needed_ports(layout.Asked(agents=6)))}
    stack = layout.compose(layout.Asked(agents=6), ports)
    layout.save(tmp_path, stack)
    assert layout.load(tmp_path) == stack
    assert [agent.name for agent in stack.agents][-2:] == ["plain-cpu-2", "plain-cpu-3"]
    assert len({address for member in stack.members for address in member.addresses.values()}) == len(ports)


def test_regions_of_one_stack_have_members_and_ports_of_their_own() -> None:
    asked = layout.Asked(agents=2, link="mqtt", regions=3, federation=1)
    names = layout.needed_ports(asked)
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(names)})
    assert layout.Asked.of(stack) == asked
    assert stack.regions == ("home", "home-2", "home-3")
    assert len({member.name for member in stack.members}) == len(stack.members)
    assert [member.name for member in stack.of("home").members] == [
        "broker", "coordinator", "gateway", "plain-cpu", "edge-npu",
    ]  # fmt: skip
    second = stack.of("home-2")
    assert second.coordinator.name == "home-2-coordinator"
    assert second.coordinator.addresses.keys() >= {"link", "models", "peers"}
    assert [member.role for member in stack.federation] == ["federation"]


@pytest.mark.parametrize(
    "asked",
    [layout.Asked(regions=0), layout.Asked(federation=2), layout.Asked(coordinators=3), layout.Asked(agents=65)],
)
def test_a_stack_that_is_not_to_be_had(asked: layout.Asked) -> None:
    with pytest.raises(ShoalError) as refused:
        layout.needed_ports(asked)
    assert refused.value.refusal.remedy
