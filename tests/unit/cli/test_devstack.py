"""One local federation a folder: two starts at once, and a folder deep in a file system."""

import datetime
import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from shoal.client import Context, Contexts
from shoal.devstack import broker, compose, etcd, layout
from shoal.devstack.control import Control
from shoal.devstack.keeper import Keeper
from shoal.types.codes import Code, ShoalError
from shoal.wire.enrol import belong

Say = Callable[[str], None]


def test_a_second_start_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    control.folder.mkdir()
    with (control.folder / "up.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ShoalError) as refused:
            control.up(layout.Asked(agents=1), lambda text: None)
    assert refused.value.code is Code.CONFLICT
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


@pytest.mark.parametrize("name", ["dev", "é" * 80 + "/" + "x" * 120], ids=["near", "deep, and not in ASCII"])
def test_what_fails_on_the_way_up_is_taken_down_again(tmp_path: Path, name: str) -> None:
    """The coordinator runs, and then the first part after it cannot: its folder is a file."""
    control = Control(tmp_path / name, Contexts(tmp_path / "home"))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("gateway"):
            (control.folder / "gateway").write_text("")

    with pytest.raises(ShoalError):
        control.up(layout.Asked(agents=1), say)
    assert [text.split()[0] for text in said] == ["coordinator", "gateway"]
    assert not control.running()
    assert not (control.folder / "keeper.sock").exists()


def test_mqtt_links_without_mosquitto_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker, "SBIN", str(tmp_path))
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    with pytest.raises(ShoalError) as refused:
        control.up(layout.Asked(agents=1, link="mqtt"), lambda text: None)
    assert refused.value.refusal.code is Code.NOT_FOUND
    assert "apt-get install mosquitto" in refused.value.refusal.remedy
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


def test_etcd_of_one_stack_is_three_members_that_its_coordinators_know(tmp_path: Path) -> None:
    asked = layout.Asked(agents=1, federation=3, store="etcd")
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(layout.needed_ports(asked))})
    assert layout.Asked.of(stack) == asked
    assert [member.name for member in stack.members[:6]] == [
        "etcd-1", "etcd-2", "etcd-3", "federation-1", "federation-2", "federation-3",
    ]  # fmt: skip
    now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    etcd.prepare(tmp_path, now)
    files = {path.name: path.read_bytes() for path in (tmp_path / etcd.FILES).iterdir()}
    ca, client, member = (
        x509.load_pem_x509_certificate(files[name]) for name in ("ca.pem", "cert.pem", "member-cert.pem")
    )
    client.verify_directly_issued_by(ca)
    member.verify_directly_issued_by(ca)
    assert belong(files["cert.pem"], files["key.pem"])
    etcd.prepare(tmp_path, now)
    assert {path.name: path.read_bytes() for path in (tmp_path / etcd.FILES).iterdir()} == files, "made once"
    flags = etcd.flags(tmp_path, stack)
    endpoints = flags[flags.index("--etcd-endpoints") + 1].split(",")
    assert endpoints == [layout.road(each.addresses["client"]) for each in stack.etcd]
    assert etcd.flags(tmp_path, stack.of("home")) == []


def test_several_coordinators_are_told_of_each_other_and_agents_of_all(tmp_path: Path) -> None:
    asked = layout.Asked(agents=1, regions=2, store="etcd", coordinators=3)
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(layout.needed_ports(asked))})
    assert layout.Asked.of(stack) == asked
    assert stack.regions == ("home", "home-2")
    home, other = stack.of("home"), stack.of("home-2")
    assert [member.name for member in home.coordinators] == ["coordinator-1", "coordinator-2", "coordinator-3"]
    assert [member.name for member in other.coordinators] == ["home-2-coordinator"]
    layout.save(tmp_path, stack)
    keeper = Keeper(tmp_path, stack)
    roads = ",".join(layout.road(member.addresses["link"]) for member in home.coordinators)
    commands = [keeper.command(member) for member in home.coordinators]
    assert {value_of(command, "--links") for command in commands} == {roads}
    assert {value_of(command, "--shared-dir") for command in commands} == {str(tmp_path / "home-shared")}
    assert len({value_of(command, "--data-dir") for command in commands}) == 3
    assert value_of(keeper.command(home.agents[0]), "--coordinator") == roads
    assert "--shared-dir" not in keeper.command(other.coordinator)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_etcd_that_is_not_installed_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    with pytest.raises(ShoalError) as refused:
        control.up(layout.Asked(agents=1, store="etcd"), lambda text: None)
    assert refused.value.refusal.code is Code.NOT_FOUND
    assert "apt-get install etcd-server" in refused.value.refusal.remedy
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


def test_etcd_members_are_dialled_by_the_names_that_their_certificate_has(tmp_path: Path) -> None:
    etcd.prepare(tmp_path, datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), ("etcd-1", "10.0.0.1"))
    for name in ("member-cert.pem", "cert.pem"):
        certificate = x509.load_pem_x509_certificate((tmp_path / etcd.FILES / name).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost", "etcd-1"]
        assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


def test_contexts_are_found_where_their_folder_was_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    inside = Context("edge", "edge", "127.0.0.1:1", str(before / "edge" / "operator"))
    elsewhere = Context("dev", "home", "127.0.0.1:2", str(tmp_path / "dev"))
    for context in (inside, elsewhere):
        Contexts(before).save(context)
    before.rename(after)
    assert Contexts(after).get("edge").folder == str(after / "edge" / "operator")
    assert Contexts(after).get("dev") == elsewhere


def test_what_is_mounted_says_which_containers_there_are(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        compose.members_in(tmp_path)
    assert refused.value.code is Code.NOT_FOUND
    for path in (
        "edge/coordinator/edge-coordinator",
        "edge/agent/edge-npu/identity",
        "federation/federation/federation",
    ):
        (tmp_path / path).mkdir(parents=True)
    found = compose.members_in(tmp_path)
    assert [(each.region, each.role, each.name) for each in found] == [
        ("edge", "agent", "edge-npu"),
        ("edge", "coordinator", "edge-coordinator"),
        ("federation", "federation", "federation"),
    ]
    assert found[1].operator.address == "edge-coordinator:7443"
    assert compose.outside("edge", "127.0.0.1:7100")["rest"] == "127.0.0.1:7104"
    with pytest.raises(ShoalError) as wrong:
        compose.outside("edge", "7100")
    assert wrong.value.code is Code.FIELD_INVALID
