"""Where an agent keeps what is its own, and what its front may take."""

from pathlib import Path

import pytest

from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.agent.dataplane import memory
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.main import options
from shoal.agent.main.options import MIN_FRONT_MEMORY, default_state_dir, parser


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"XDG_STATE_HOME": "/srv/state"}, Path("/srv/state/shoal/agent")),
        ({}, Path.home() / ".local/state/shoal/agent"),
        ({"XDG_STATE_HOME": ""}, Path.home() / ".local/state/shoal/agent"),
        ({"XDG_STATE_HOME": "relative"}, Path.home() / ".local/state/shoal/agent"),
    ],
)
def test_state_lies_where_the_desktop_s_standard_says(given: dict[str, str], found: Path) -> None:
    assert default_state_dir(given) == found


@pytest.mark.parametrize("command", [["join", "--coordinator", "c:1", "--token", "t"], ["run"], ["doctor"], ["clock"]])
def test_every_command_looks_there(command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert parser().parse_args(command).state_dir == tmp_path / "shoal" / "agent"


def front_memory(*flags: str) -> int:
    return options.make_config(parser().parse_args(["run", *flags])).front_memory


def test_a_fronts_memory_is_the_machines_unless_an_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_FRONT_MEMORY", raising=False)
    assert front_memory() == 0
    monkeypatch.setenv("SHOAL_FRONT_MEMORY", "1GiB")
    assert front_memory() == 2**30
    assert front_memory("--front-memory", "512MiB") == 512 * 2**20
    assert memory.budget_bytes(512 * 2**20) < memory.budget_bytes(2**30)


@pytest.mark.parametrize("size", ["255MiB", "1", "-1GiB", "much", "0"])
def test_a_front_gets_at_least_what_one_request_takes(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        front_memory(f"--front-memory={size}")
    assert "--front-memory" in capsys.readouterr().err
    assert front_memory("--front-memory", "256MiB") == MIN_FRONT_MEMORY
    assert memory.MIN_BUDGET_BYTES + memory.BASELINE_BYTES <= MIN_FRONT_MEMORY


def shared_memory(*flags: str) -> tuple[SharedMemoryGrant, ...]:
    return options.make_config(parser().parse_args(["run", *flags])).shared_memory


def test_nobody_has_shared_memory_unless_an_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_SHARED_MEMORY", raising=False)
    assert shared_memory() == ()
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "acme=acme-")
    assert shared_memory() == (SharedMemoryGrant("acme", "acme-"),)
    found = shared_memory("--shared-memory", "acme=acme-,acme=other.,shop=shop-")
    assert [(each.tenant, each.prefix) for each in found] == [("acme", "acme-"), ("acme", "other."), ("shop", "shop-")]
    config = FrontConfig("n", "r", "h", 1, "c", "k", "a", "d", shared_memory=found)
    assert FrontConfig.load(config.dump()) == config


@pytest.mark.parametrize("grants", ["acme", "acme=", "=x", "Acme=x", "acme=/x", "acme=../x", "acme=a,shop=ab", "a=x y"])
def test_a_prefix_is_plain_and_no_other_tenants(grants: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shared_memory(f"--shared-memory={grants}")
    assert "--shared-memory" in capsys.readouterr().err
