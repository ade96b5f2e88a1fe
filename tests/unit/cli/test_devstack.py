"""One local federation a folder: two starts at once, and a folder deep in a file system."""

import asyncio
import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import files as package_files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import yaml
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from harness.wait import until, wait_until
from shoal.agent.devices.emulated import load_profile
from shoal.agent.devices.published import pace_of
from shoal.agent.emulation import seconds_of
from shoal.cli.commands.dev import show_up
from shoal.cli.main import shoal
from shoal.cli.render.demo_screen import SilentDemo
from shoal.client import Context, Contexts, RegionClient
from shoal.devstack import broker, compose, etcd, layout, process_supervisor
from shoal.devstack import control as control_module
from shoal.devstack.control import STALLED_AFTER_S, Control, RunningStack, _free_ports, _rates_of
from shoal.devstack.demo import LOAD_CLIENTS, Demo
from shoal.devstack.layout import StackMember
from shoal.devstack.load import ClosedLoopLoad, LoadCall, MixedLoad
from shoal.devstack.process_supervisor import ProcessSupervisor
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes
from shoal.v1 import operator_pb2
from shoal.wire.enrol import is_matching_pair

Say = Callable[[str], None]


def test_a_second_start_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    control.folder.mkdir()
    with (control.folder / "up.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ShoalError) as refused:
            control.up(layout.StackOptions(agents=1), lambda text: None)
    assert refused.value.code is Code.CONFLICT
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


@pytest.mark.parametrize("name", ["dev", "é" * 80 + "/" + "x" * 120], ids=["near", "deep, and not in ASCII"])
def test_what_fails_on_the_way_up_is_taken_down_again(tmp_path: Path, name: str) -> None:
    """The coordinator runs, and then the first part after it cannot: its folder is a file."""
    control = Control(tmp_path / name, Contexts(tmp_path / "home"))
    said: list[str] = []
    control.folder.mkdir(parents=True)
    (control.folder / "mine").mkdir()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("gateway"):
            (control.folder / "gateway").write_text("")

    with pytest.raises(ShoalError):
        control.up(layout.StackOptions(agents=1), say)
    assert [text.split()[0] for text in said] == ["coordinator", "gateway"]
    assert not control.running()
    left = {path.name for path in control.folder.iterdir()}
    assert left == {"mine", "logs", "supervisor.log", "up.lock"}, "the next one may be asked for something else"


@pytest.mark.parametrize(
    "asked",
    [
        layout.StackOptions(agents=1, link="mqtt"),
        layout.StackOptions(agents=1, regions=2, federation=2, store=layout.ETCD, coordinators=2),
    ],
    ids=["mqtt", "etcd"],
)
def test_a_first_start_that_failed_deletes_what_it_made_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: layout.StackOptions
) -> None:
    """Others write to the folder before and meanwhile, where it is the folder that the user works in."""
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    (control.folder / "gateway").mkdir(parents=True)
    (control.folder / "client").symlink_to(tmp_path)
    made = {"coordinator", "broker", "plain-cpu", "plain-cpu.condition.json"}
    if asked.store == layout.ETCD:
        made = {"coordinator-2", "home-shared", "federation-shared", "home-2-coordinator", "home-2-client", "etcd"}

    def fail(*_: object) -> None:
        names = layout.port_names(asked)
        layout.save(control.folder, layout.compose(asked, dict.fromkeys(names, 1000)))
        for name in made:
            (control.folder / name).mkdir()
        (control.folder / "shops").mkdir()
        (control.folder / "shops" / "mine.yaml").write_text("the user's, and not in any other place")
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "_start", fail)
    with pytest.raises(KeyboardInterrupt):
        control.up(asked, lambda text: None)
    assert {path.name for path in control.folder.iterdir()} == {"gateway", "client", "shops", "up.lock"}
    assert [path.name for path in (control.folder / "shops").iterdir()] == ["mine.yaml"]


def test_a_full_disk_ends_a_start_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the half of a layout that had room was read again, or agents that had none were waited for."""
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    write = Path.write_text

    def fill(path: Path, text: str, *_: object) -> int:
        write(path, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill)
        with pytest.raises(OSError, match=r"No space left.*stack\.json"):
            control.up(layout.StackOptions(agents=1), lambda text: None)
    assert {path.name for path in control.folder.iterdir()} == {"up.lock"}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(ShoalError) as error:
        control._wait_for_receipts(cast(RegionClient, None), ())
    assert error.value.code is Code.DISK_FULL
    assert str(control.folder) in error.value.refusal.found


def test_a_start_that_failed_before_it_made_anything_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))

    def fail(*_: object) -> None:
        (control.folder / "gateway").mkdir()  # not by the stack, which has no layout yet
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "_start", fail)
    with pytest.raises(KeyboardInterrupt):
        control.up(layout.StackOptions(agents=1), lambda text: None)
    assert {path.name for path in control.folder.iterdir()} == {"gateway", "up.lock"}


def stopped_stack(folder: Path, contexts: Contexts) -> Control:
    """A stack that ran there once."""
    asked = layout.StackOptions(agents=2)
    control = Control(folder, contexts)
    names = layout.port_names(asked)
    layout.save(folder, layout.compose(asked, dict(zip(names, _free_ports(len(names)), strict=True))))
    return control


def test_a_start_beside_another_stack_says_what_is_in_the_way_and_spares_it(tmp_path: Path) -> None:
    """Its data are somebody's: no advice ends them, and its contexts stay."""
    contexts = Contexts(tmp_path / "home")
    control = stopped_stack(tmp_path / "dev", contexts)
    (tmp_path / "dev-2").mkdir()
    contexts.save(Context("dev", "home", "127.0.0.1:1", str(tmp_path / "elsewhere" / "coordinator" / "operator")))
    with pytest.raises(ShoalError) as refused:
        control.up(layout.StackOptions(agents=4), lambda text: None)
    assert refused.value.code is Code.CONFLICT
    refusal = refused.value.refusal
    assert "with 2 agents" in refusal.found
    assert "purge" not in str(refusal)
    assert f"--data-dir {tmp_path / 'dev-3'}" in refusal.remedy
    assert (tmp_path / "dev" / "stack.json").exists()
    assert [each.name for each in contexts.all()] == ["dev"], "another stack's"


@pytest.mark.parametrize("is_usual", [True, False], ids=["usual folder", "folder of its own"])
def test_what_is_up_with_other_options_says_what_starts_those_that_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_usual: bool
) -> None:
    """A stopped stack starts with its own options alone: `shoal dev down` is not enough."""
    contexts, said, folder = Contexts(tmp_path / "home"), list[str](), tmp_path / "dev"
    monkeypatch.setattr(layout, "default_folder", lambda: folder if is_usual else tmp_path / "usual")
    control = stopped_stack(folder, contexts)
    contexts.save(Context("dev", "home", "127.0.0.1:1", str(folder / "coordinator" / "operator")))
    monkeypatch.setattr(control, "running", lambda: True)
    control.up(layout.StackOptions(agents=2), said.append)
    assert said == [f"already up in {folder}"]
    contexts.save(Context("dev", "home", "127.0.0.1:1", str(tmp_path / "dev-2" / "coordinator" / "operator")))
    control.up(layout.StackOptions(agents=4), said.append)
    assert contexts.get("dev").folder.startswith(f"{folder}/"), "another stack took its name meanwhile"
    purge = "shoal dev down --purge" + ("" if is_usual else f" --data-dir {folder}")
    assert said[2:] == [
        f"as it was started; for what is asked now: --data-dir {tmp_path / 'dev-2'}",
        f"or {purge} first, which deletes what was applied",
    ]
    monkeypatch.undo()
    control.purge()
    assert layout.StackOptions.from_stack(control._load_or_compose(layout.StackOptions(agents=4))).agents == 4


class FakeTime:
    """Stands in for the module `time`: it passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("every_s", [STALLED_AFTER_S * 0.9, STALLED_AFTER_S * 1.1], ids=["in time", "one too late"])
def test_the_end_is_waited_for_as_long_as_members_go_on_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    """However long all of them take."""
    control, clock, said = Control(tmp_path / "dev", Contexts(tmp_path / "home")), FakeTime(), list[str]()
    monkeypatch.setattr(control_module, "time", clock)

    def ask(request: dict[str, Any]) -> list[str]:
        assert request == {"op": "down"}
        ended = int(clock.now / every_s)
        if ended > 41:
            raise refuse(Code.NOT_FOUND, "none", "one that runs", "shoal dev up")
        return [f"shop-{number}" for number in range(ended, 41)]

    monkeypatch.setattr(control, "ask", ask)
    if every_s < STALLED_AFTER_S:
        control.down(said.append)
        assert clock.now > 41 * every_s
        assert (said[0], said[-1]) == ("stopping: 41 of 41 left", "stopping: 0 of 41 left")
        return
    with pytest.raises(ShoalError) as stalled:
        control.down(said.append)
    assert stalled.value.code is Code.DEADLINE_EXCEEDED
    assert "41 of 41 members still run" in stalled.value.refusal.found
    assert "shop-0, shop-1, shop-2, shop-3, shop-4, .." in stalled.value.refusal.found


class HeldSupervisor(ProcessSupervisor):
    """Its members end once the folder has a file `go`."""

    def command(self, member: StackMember) -> list[str]:
        wait = f"until [ -e '{self._folder}/go' ]; do sleep 0.02; done"
        return ["sh", "-c", f'trap "{wait}; exit" TERM; echo "{{}}"; while true; do sleep 0.02; done']


async def test_what_ends_late_is_waited_for_again_and_purged_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_supervisor, "STOP_WITHIN_S", 60.0)
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    supervisor = HeldSupervisor(control.folder, layout.load(control.folder))
    running = asyncio.create_task(supervisor.run())
    try:
        await until((control.folder / process_supervisor.SOCKET).exists, 30.0, "the supervisor to listen")
        for name in ("plain-cpu", "edge-npu"):
            await asyncio.to_thread(control.ask, {"op": "start", "name": name})
        with pytest.raises(ShoalError) as stalled:
            await asyncio.to_thread(control.down, stalled_after_s=0.3)
        assert stalled.value.code is Code.DEADLINE_EXCEEDED
        assert "2 of 2 members still run" in stalled.value.refusal.found
        for call, code in (
            (control.purge, Code.IN_USE),
            (partial(control.up, layout.StackOptions(agents=2), print), Code.CONFLICT),
        ):
            with pytest.raises(ShoalError) as refused:
                await asyncio.to_thread(call)
            assert refused.value.code is code
        with pytest.raises(ShoalError) as refused:
            await asyncio.to_thread(control.ask, {"op": "start", "name": "gateway"})
        assert refused.value.code is Code.CONFLICT, "it would outlive the others"
    finally:
        (control.folder / "go").touch()
        await asyncio.to_thread(control.down)
        await running
    control.purge()
    assert not control.folder.exists()


async def test_what_is_temporary_ends_with_its_starter_and_leaves_no_folder(tmp_path: Path) -> None:
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    (control.folder / "go").touch()
    ours, starter = os.pipe()
    try:
        supervisor = HeldSupervisor(control.folder, layout.load(control.folder), ours)
        running = asyncio.create_task(supervisor.run())
        await until((control.folder / process_supervisor.SOCKET).exists, 30.0, "the supervisor to listen")
        await asyncio.to_thread(control.ask, {"op": "start", "name": "plain-cpu"})
        (member,) = (each for each in await asyncio.to_thread(control.status) if each["role"] == "supervisor")
        os.close(starter)  # as the kernel does where it is killed
        await asyncio.wait_for(running, 30.0)
    finally:
        os.close(ours)
    assert not psutil.pid_exists(member["pid"])
    assert not control.folder.exists()


async def test_what_an_abandoned_stack_leaves_is_deleted_once_nobody_writes_there(tmp_path: Path) -> None:
    """Whoever is killed may have had an agent join: it goes on, and would make the folder again."""
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    ours, starter = os.pipe()
    state = control.folder / "plain-cpu"
    joining = await asyncio.create_subprocess_exec(
        *("sh", "-c", "read go; mkdir -p $1; touch $1/key.pem", "sh", str(state)), stdin=asyncio.subprocess.PIPE
    )
    try:
        supervisor = HeldSupervisor(control.folder, layout.load(control.folder), ours)
        running = asyncio.create_task(supervisor.run())
        await until((control.folder / process_supervisor.SOCKET).exists, 30.0, "the supervisor to listen")
        os.close(starter)
        await until(lambda: not (control.folder / process_supervisor.SOCKET).exists(), 30.0, "all members to end")
        assert control.folder.exists()
        await joining.communicate(b"go\n")
        await asyncio.wait_for(running, 30.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            joining.kill()
        os.close(ours)
    assert joining.returncode == 0
    assert not control.folder.exists()


async def test_what_is_named_for_ever_does_not_keep_an_abandoned_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may read a log there."""
    monkeypatch.setattr(process_supervisor, "STOP_WITHIN_S", 0.2)
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    ours, starter = os.pipe()
    os.close(starter)
    reader = await asyncio.create_subprocess_exec(
        *("sh", "-c", "read go", "sh", str(control.folder / "logs")), stdin=asyncio.subprocess.PIPE
    )
    try:
        await asyncio.wait_for(HeldSupervisor(control.folder, layout.load(control.folder), ours).run(), 30.0)
        assert reader.returncode is None
    finally:
        await reader.communicate(b"")
        os.close(ours)
    assert not control.folder.exists()


TEMPORARY_SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from shoal.devstack import layout
from shoal.devstack.process_supervisor import ProcessSupervisor

class Supervisor(ProcessSupervisor):
    def command(self, member):
        return ["/bin/sh", "-c", "echo {}; exec sleep 3600"]

folder = Path(sys.argv[1])
asyncio.run(Supervisor(folder, layout.load(folder), sys.stdin.fileno()).run())
"""


def test_the_members_of_what_is_temporary_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    supervisor = subprocess.Popen(
        [sys.executable, "-c", TEMPORARY_SUPERVISOR, str(control.folder)], stdin=subprocess.PIPE
    )
    member = None
    try:
        wait_until(control.running, 30.0, "the supervisor to listen")
        control.ask({"op": "start", "name": "plain-cpu"})
        (row,) = (each for each in control.status() if each["role"] == "supervisor")
        member = psutil.Process(row["pid"])
        wait_until(lambda: member.cmdline() == ["sleep", "3600"], 30.0, "it to have become its program")
        supervisor.kill()
        wait_until(lambda: has_ended(member), 30.0, "the member to end")
    finally:
        supervisor.kill()
        supervisor.communicate()
        if member is not None and not has_ended(member):
            member.kill()


def has_ended(process: psutil.Process) -> bool:
    """Where nobody reaps orphans, they stay as zombies."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_member_whose_starter_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.devstack.temporary_member", "-1", "touch", str(tmp_path / "begun")]
    subprocess.run(command, check=True, timeout=30)
    assert not (tmp_path / "begun").exists()
    command[3] = str(os.getpid())
    subprocess.run(command, check=True, timeout=30)
    assert (tmp_path / "begun").exists()


def test_no_temporary_stack_is_in_the_usual_folder() -> None:
    with pytest.raises(ValueError, match="default folder"):
        Control(is_temporary=True)


LATE_SUPERVISOR = """
import shutil, sys, time
from pathlib import Path

sys.stdin.read()
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)
shutil.rmtree(sys.argv[1])
"""
"""Does not listen, finds that nobody wants it, and deletes the folder once there is the file."""


def test_a_start_after_one_that_failed_does_not_lose_its_folder_to_the_first_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"), is_temporary=True)
    asked = layout.StackOptions(agents=1)
    go = tmp_path / "go"
    go.touch()

    def fail_to_listen(*_: object) -> None:
        raise refuse(Code.DEADLINE_EXCEEDED, "none", "one that listens", "wait")

    monkeypatch.setattr(control_module, "wait", fail_to_listen)

    monkeypatch.setattr(
        control, "_supervisor_command", lambda: [sys.executable, "-c", LATE_SUPERVISOR, str(control.folder), str(go)]
    )

    def start_in_vain(stalled_after_s: float) -> Code:
        monkeypatch.setattr(control, "down", partial(Control.down, control, stalled_after_s=stalled_after_s))
        with pytest.raises(ShoalError) as refused:
            control.up(asked, lambda text: None)
        return refused.value.code

    assert start_in_vain(60.0) is Code.INTERNAL
    assert not control.folder.exists(), "its end was waited for"
    go.unlink()
    assert start_in_vain(0.05) is Code.INTERNAL
    held = control._held
    assert held is not None
    try:
        assert start_in_vain(0.05) is Code.CONFLICT, "the folder will be deleted"
        assert control._held is held
    finally:
        go.touch()
        held.wait(30.0)
    assert start_in_vain(60.0) is Code.INTERNAL, "it is tried again"


async def test_a_member_that_starts_while_all_end_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can signal a process that is being made."""
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    made, make = list[asyncio.subprocess.Process](), asyncio.create_subprocess_exec

    async def make_late(*words: str, **options: Any) -> asyncio.subprocess.Process:
        if "sh" in words:
            supervisor._stopping.set()
            await until(lambda: supervisor._programs["plain-cpu"].no_restart, 30.0, "it to be stopped")
        made.append(await make(*words, **options))
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", make_late)
    supervisor = HeldSupervisor(control.folder, layout.load(control.folder))
    running = asyncio.create_task(supervisor.run())
    await until((control.folder / process_supervisor.SOCKET).exists, 30.0, "the supervisor to listen")
    with contextlib.suppress(ShoalError):  # unless it was ready before it was killed
        await asyncio.to_thread(control.ask, {"op": "start", "name": "plain-cpu"})
    await asyncio.wait_for(running, 30.0)
    assert [each.returncode for each in made] == [-signal.SIGKILL] * 2, "the relays, and the member"


class FragileSupervisor(ProcessSupervisor):
    """The program of `plain-cpu` can be taken away."""

    def command(self, member: StackMember) -> list[str]:
        program = self._folder / "program"
        return [str(program) if member.name == "plain-cpu" else "/bin/sh", "-c", 'echo "{}"; exec sleep 300']


async def test_a_program_that_is_absent_for_a_while_is_started_then_and_keeps_no_other_up(tmp_path: Path) -> None:
    """As while its environment is upgraded."""
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    program = control.folder / "program"
    program.symlink_to("/bin/sh")
    supervisor = FragileSupervisor(control.folder, layout.load(control.folder))
    running = asyncio.create_task(supervisor.run())
    await until((control.folder / process_supervisor.SOCKET).exists, 30.0, "the supervisor to listen")
    for name in ("gateway", "plain-cpu"):
        await asyncio.to_thread(control.ask, {"op": "start", "name": name})
    fragile, log = supervisor._programs["plain-cpu"], control.folder / "logs/plain-cpu.log"
    program.unlink()
    assert fragile.process is not None
    fragile.process.kill()
    await until(lambda: "No such file" in log.read_text(), 30.0, "a start in vain")
    program.symlink_to("/bin/sh")
    await until(lambda: fragile.start_count == 2, 30.0, "another start")
    program.unlink()
    fragile.process.kill()
    await until(lambda: log.read_text().count("No such file") > 1, 30.0, "a start in vain")
    await asyncio.to_thread(control.down)
    await asyncio.wait_for(running, 30.0)
    left = [each.process.returncode for each in supervisor._programs.values() if each.process is not None]
    assert None not in left


def test_a_kept_demo_spares_regions_that_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "running", lambda control: True)
    done = CliRunner().invoke(shoal, ["demo", "--keep", "--data-dir", str(tmp_path)])
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.IN_USE
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_keeps_nothing_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.devstack.demo.Demo.run", lambda demo: pytest.fail("it began"))
    done = CliRunner().invoke(shoal, ["demo", "--data-dir", str(tmp_path / "demo")])
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.USAGE
    assert list(tmp_path.iterdir()) == []


def test_a_kept_demo_spares_regions_that_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start them, with what is applied there."""
    monkeypatch.setattr("shoal.devstack.demo.Demo.run", lambda demo: pytest.fail("it began"))
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    done = CliRunner().invoke(shoal, ["demo", "--keep", "--data-dir", str(control.folder)])
    assert isinstance(done.exception, ShoalError)
    assert done.exception.code is Code.IN_USE
    assert "were up" in done.exception.refusal.found
    assert [each.name for each in control.folder.iterdir()] == [layout.FILE]


def test_a_folder_that_cannot_be_deleted_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))

    def deny(path: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", deny)
    with pytest.raises(ShoalError) as refused:
        control.purge()
    assert refused.value.code is Code.IN_USE
    assert "Directory not empty" in refused.value.refusal.found


def test_a_port_that_another_program_took_is_named(tmp_path: Path) -> None:
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    taken = layout.load(control.folder).gateways[0].addresses["data"]
    host, _, port = taken.rpartition(":")
    with socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(ShoalError) as refused:
            control.up(layout.StackOptions(agents=2), lambda text: None)
    assert refused.value.code is Code.CONFLICT
    assert f"{taken}, the data port of gateway" in refused.value.refusal.found
    assert "--data-dir" in refused.value.refusal.remedy


def test_what_is_up_tells_where_devices_join(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    control = stopped_stack(tmp_path / "dev", Contexts(tmp_path / "home"))
    stack = layout.load(control.folder)
    files = Context("dev", "home", stack.coordinator_addresses("link"), str(tmp_path / "dev" / "client"))
    show_up(RunningStack(stack, control.folder, files, files, tmp_path / "bearer"))
    said = capsys.readouterr().out
    enrolment = stack.coordinator_addresses("enrol")
    assert f"enrolment {enrolment}: shoal-agent join --coordinator {enrolment}" in said
    assert f"link      {stack.coordinator_addresses('link')}" in said


def test_mqtt_links_without_mosquitto_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker, "SBIN", str(tmp_path))
    control = Control(tmp_path / "dev", Contexts(tmp_path / "home"))
    with pytest.raises(ShoalError) as refused:
        control.up(layout.StackOptions(agents=1, link="mqtt"), lambda text: None)
    assert refused.value.refusal.code is Code.NOT_FOUND
    assert "apt-get install mosquitto" in refused.value.refusal.remedy
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


def test_etcd_of_one_stack_is_three_members_that_its_coordinators_know(tmp_path: Path) -> None:
    asked = layout.StackOptions(agents=1, federation=3, store="etcd")
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(layout.port_names(asked))})
    assert layout.StackOptions.from_stack(stack) == asked
    assert [member.name for member in stack.members[:6]] == [
        "etcd-1", "etcd-2", "etcd-3", "federation-1", "federation-2", "federation-3",
    ]  # fmt: skip
    now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    assert etcd.scopes_of(stack) == ("federation/federation", "region/home")
    folder = etcd.prepare(tmp_path, now, etcd.scopes_of(stack))
    files = contents(folder)
    assert {name.parent.name for name in files} == {
        "authority", "member", "root", "federation-federation", "region-home"
    }  # fmt: skip
    assert [name for name in files if name.name == "ca-key.pem"] == [folder / "authority" / "ca-key.pem"]
    assert [name for name in files if name.name == "member-key.pem"] == [folder / "member" / "member-key.pem"]
    etcd.prepare(tmp_path, now, etcd.scopes_of(stack))
    assert contents(folder) == files, "made once"
    etcd.prepare(tmp_path, now, (*etcd.scopes_of(stack), "region/new"))
    assert {**contents(folder), **files} == contents(folder), "what is missing is made"
    assert (folder / "region-new" / "key.pem").exists()
    for name, member in (("region-home", stack.coordinator), ("federation-federation", stack.federation[0])):
        flags = etcd.store_flags(tmp_path, stack, member)
        endpoints = flags[flags.index("--etcd-endpoints") + 1].split(",")
        assert endpoints == [layout.relay_address(each.addresses["client"]) for each in stack.etcd]
        assert flags[flags.index("--etcd-key") + 1] == str(folder / name / "key.pem")
    assert etcd.store_flags(tmp_path, stack.for_region("home"), stack.coordinator) == []
    users = etcd.users_command(tmp_path, stack)
    assert users[:5] == ["etcd-users", "--scope", "federation/federation", "--scope", "region/home"]
    assert users[users.index("--etcd-key") + 1] == str(folder / "root" / "key.pem")
    assert "--peer-cert-allowed-cn member-etcd" in " ".join(etcd.command(tmp_path, stack, stack.etcd[0]))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.pem"))}


def test_the_certificates_of_etcd_are_made_again_where_the_ca_is_another(tmp_path: Path) -> None:
    now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    folder = etcd.prepare(tmp_path, now, ["region/home"])
    before = contents(folder)
    shutil.rmtree(folder / "authority")
    etcd.prepare(tmp_path, now, ["region/home"])
    after = contents(folder)
    assert {*after} == {*before}
    assert all(after[path] != before[path] for path in before)


def test_several_coordinators_are_told_of_each_other_and_agents_of_all(tmp_path: Path) -> None:
    asked = layout.StackOptions(agents=1, regions=2, store="etcd", coordinators=3)
    stack = layout.compose(asked, {name: 20_000 + index for index, name in enumerate(layout.port_names(asked))})
    assert layout.StackOptions.from_stack(stack) == asked
    assert stack.regions == ("home", "home-2")
    home, other = stack.for_region("home"), stack.for_region("home-2")
    assert [member.name for member in home.coordinators] == ["coordinator-1", "coordinator-2", "coordinator-3"]
    assert [member.name for member in other.coordinators] == ["home-2-coordinator"]
    layout.save(tmp_path, stack)
    keeper = ProcessSupervisor(tmp_path, stack)
    roads = ",".join(layout.relay_address(member.addresses["link"]) for member in home.coordinators)
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
        control.up(layout.StackOptions(agents=1, store="etcd"), lambda text: None)
    assert refused.value.refusal.code is Code.NOT_FOUND
    assert "apt-get install etcd-server" in refused.value.refusal.remedy
    assert [path.name for path in control.folder.iterdir()] == ["up.lock"], "nothing was begun"


def test_etcd_members_are_dialled_by_the_names_that_their_certificate_has(tmp_path: Path) -> None:
    now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    folder = etcd.prepare(tmp_path, now, ["region/home"], ("etcd-1", "10.0.0.1"))
    certificate = x509.load_pem_x509_certificate((folder / "member" / "member-cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "etcd-1"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


@pytest.mark.parametrize(("name", "user"), [("region-home", "region-home"), ("root", "root")])
def test_a_certificate_of_a_user_of_etcd_is_no_member_s_and_no_server_s(tmp_path: Path, name: str, user: str) -> None:
    """It was both: whoever held a coordinator's could answer for etcd, and join it."""
    folder = etcd.prepare(tmp_path, datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), ["region/home"], ("etcd-1",))
    pem = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
    ca, certificate = (x509.load_pem_x509_certificate(pem[each]) for each in ("ca.pem", "cert.pem"))
    certificate.verify_directly_issued_by(ca)
    assert is_matching_pair(pem["cert.pem"], pem["key.pem"])
    assert certificate.subject.rfc4514_string() == f"CN={user}"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [*uses] == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_all_files_of_etcd_but_the_ca_s_are_given_to_the_user_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: set[Path] = set()

    def chown(path: Path, user: int, group: int) -> None:
        assert (user, group) == (10001, 10001)
        given.add(path)

    monkeypatch.setattr(shutil, "chown", chown)
    arguments = ["etcd", "--out", str(tmp_path), "--host", "etcd-1", "--scope", "region/edge", "--owner", "10001"]
    compose.compose(arguments, standalone_mode=False)
    folder = tmp_path / etcd.FILES
    owned = {"member", "root", "region-edge"}
    assert given == {path for name in owned for path in (folder / name, *(folder / name).iterdir())}
    assert {(folder / name).stat().st_mode & 0o777 for name in owned} == {0o700}
    for wrong in ("edge", "root/edge", "region/", "region/Edge", "region/../root"):
        with pytest.raises(ShoalError) as refused:
            compose.compose([*arguments, "--scope", wrong], standalone_mode=False)
        assert refused.value.code in (Code.FIELD_INVALID, Code.NAME_INVALID)


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
    assert compose.published_addresses("edge", "127.0.0.1:7100")["data"] == "127.0.0.1:7103"
    with pytest.raises(ShoalError) as wrong:
        compose.published_addresses("edge", "7100")
    assert wrong.value.code is Code.FIELD_INVALID


class RecordedDemo(SilentDemo):
    """A narrator that keeps what it is told to say."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("outcome", "lost"),
    [("OVERLOADED", 0), ("INVALID_ARGUMENT", 0), ("DEADLINE_EXCEEDED", 0), ("REPLICA_UNREACHABLE", 1), ("INTERNAL", 1)],
)
def test_the_demo_counts_as_lost_what_gateways_do(tmp_path: Path, outcome: str, lost: int) -> None:
    """No refusal, and no deadline that the client had set itself; but either is an answer that is missing."""
    load = ClosedLoopLoad(Context("dev", "home", "127.0.0.1:1", str(tmp_path)), "reader", {}, {})
    load.calls = [LoadCall(0.0, 0.1, "ok"), LoadCall(0.1, 0.1, "ok"), LoadCall(0.2, 0.1, outcome)]
    told = RecordedDemo()
    demo = Demo(Control(tmp_path / "dev", Contexts(tmp_path / "home")), told)
    demo._show_migration(
        operator_pb2.MigrationView(stage="done", stages=[operator_pb2.MigrationStage(stage="done")]),
        MixedLoad([load]),
    )
    said = f"  requests while it moved: 3 sent, 2 answered, {1 - lost} refused or given up, {lost} lost"
    assert said in told.said
    assert demo.report.migration["lost"] == lost
    checks = {check.name: check.ok for check in demo.report.checks}
    assert checks["no request was lost by the move"] is (lost == 0)
    assert checks["every request was answered meanwhile"] is False


@pytest.mark.parametrize("profile", ["nvidia-l4", "qualcomm-ai100-dm2"])
def test_emulated_devices_of_the_demo_can_answer_twice_the_rate_that_it_shows(profile: str) -> None:
    """At least 50 requests a second, where all workloads share one device, as with the least energy. The bound is of
    the devices' pace and the clients alone, so that no machine's load changes it."""
    scale, shown_per_s = 60.0, 50.0  # the scale that two cores of a server come to
    folder = package_files("shoal.devstack").joinpath("demo_data")
    batches = {
        one["metadata"]["name"]: one["spec"].get("batching", {}).get("max", 1)
        for one in yaml.safe_load_all(folder.joinpath("fast.yaml").read_text())
        if one["kind"] == "Workload"
    }
    assert batches.keys() == LOAD_CLIENTS.keys()
    pace = pace_of(load_profile(profile), Bytes(1 << 30))
    resnet = next(each for each in pace.figures if each.model == "resnet50")  # larger than any run of the load
    turns_s = len(batches) * seconds_of(resnet, pace.launch_s, resnet.flops) * scale
    answered = sum(min(clients, batches[name]) for name, clients in LOAD_CLIENTS.items())
    assert answered / turns_s >= 2 * shown_per_s


def test_a_fleet_is_agents_of_one_kind_each_in_a_site_of_its_own() -> None:
    asked = layout.StackOptions(
        agents=1,
        regions=2,
        groups=(layout.AgentGroup.parse("shop=12"), layout.AgentGroup.parse("depot=1:nvidia-l4")),
    )
    names = layout.port_names(asked)
    stack = layout.compose(asked, {name: 1000 + at for at, name in enumerate(names)})
    shops = [member for member in stack.agents if member.labels.get("group") == "shop"]
    assert [member.name for member in shops] == [f"shop-{number:02d}" for number in range(1, 13)]
    assert all(member.labels["site"] == member.name and member.emulate == "rk3588s" for member in shops)
    assert {member.region for member in shops} == {layout.REGION}, "its neighbours have their own"
    assert layout.StackOptions.from_stack(stack) == asked, "a restart is of the same"
    assert "12 agents shop-.. that emulate rk3588s" in str(asked)
    assert [member.name for member in stack.kinds.values()] == ["plain-cpu", "shop-01", "depot-1"]


@pytest.mark.parametrize(
    ("fleets", "found"),
    [
        (("shop",), "fleet 'shop'"),
        (("shop=many",), "fleet 'shop=many'"),
        (("shop=-1",), "fleet 'shop=-1'"),
        (("shop=0",), "a fleet of 0 of shop"),
        (("shop=60", "depot=4"), "a fleet of 60 of shop, 4 of depot"),
        (("Shop=2",), "fleet 'Shop'"),
        (("shop=2", "shop=2:nvidia-l4"), "2 fleets called shop"),
        (("shop=2", "shop=12"), "2 fleets called shop"),  # shop-1 and shop-01: no two agents of one name
        (("coordinator=2", "home=1"), "2 parts called coordinator-1"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(fleets: tuple[str, ...], found: str) -> None:
    asked = layout.StackOptions(agents=1, store=layout.ETCD, coordinators=2)
    with pytest.raises(ShoalError) as refused:
        layout.port_names(replace(asked, groups=tuple(map(layout.AgentGroup.parse, fleets))))
    assert refused.value.refusal.found == found
    assert "fleet" in refused.value.refusal.remedy


class MeasuredRegion:
    """A region whose devices are these, by node: (FLOP/s of a convolution, is emulated)."""

    def __init__(self, rates: Mapping[str, tuple[float, bool]]) -> None:
        self._rates = rates

    def get(self, kind: str) -> operator_pb2.GetReply:
        assert kind == "devices"
        reply = operator_pb2.GetReply()
        for node, (flops, is_emulated) in self._rates.items():
            view = reply.devices.add(node=node)
            view.device.emulated = is_emulated
            view.receipt.rates.conv_flops["fp32"] = flops
        return reply


def test_agents_that_did_not_start_yet_are_as_fast_as_the_first_of_their_kind() -> None:
    """A device that somebody else brought counts, too."""
    asked = layout.StackOptions(agents=1, groups=(layout.AgentGroup("shop", 3), layout.AgentGroup("depot", 1, "x")))
    stack = layout.compose(asked, dict.fromkeys(layout.port_names(asked), 1000))
    rates = {"plain-cpu": (1e11, False), "shop-1": (2e11, True), "depot-1": (3e11, True), "guest": (4e11, True)}
    region = cast(RegionClient, MeasuredRegion(rates))
    found = sorted((rate.flops, rate.is_emulated) for rate in _rates_of({layout.REGION: region}, stack))
    assert found == [(1e11, False), (2e11, True), (2e11, True), (2e11, True), (3e11, True), (4e11, True)]


def test_a_folder_from_here_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts name files in it."""
    monkeypatch.chdir(tmp_path)
    assert Control(Path("fleet")).folder == tmp_path / "fleet"
