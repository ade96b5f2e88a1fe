"""Control groups of workers: both versions' files, in a folder that stands for the kernel's file system."""

import os
from pathlib import Path

import pytest

from shoal.agent.worker.cgroups import IDLE_BYTES, MAX_TASKS, MEMORY, Cgroup, Cgroups

PID = 4711
MIB = 2**20


def second(
    root: Path, own: str, *, offered: str = "cpu memory pids", standing: str = "", there: str = f"{PID}\n"
) -> Path:
    """A group of version 2 and its files."""
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    folder = root / own
    folder.mkdir(parents=True)
    for name, text in (
        ("cgroup.controllers", offered), ("cgroup.subtree_control", standing), ("cgroup.procs", there)
    ):  # fmt: skip
        (folder / name).write_text(text)
    return folder


def test_version_2_moves_aside_and_limits_what_is_below(tmp_path: Path) -> None:
    own = second(tmp_path, "system.slice/shoal.service")
    groups = Cgroups.detect(tmp_path, "0::/system.slice/shoal.service\n", PID)
    assert groups.unsupported_limits == ()
    assert (own / "supervisor/cgroup.procs").read_text() == str(PID), "a group with processes limits none below it"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    (own / "worker-1").mkdir()
    (own / "worker-1/memory.max").write_text("max\n")
    group = groups.make("worker-1")
    assert group is not None
    group.add(42)
    assert (own / "worker-1/cgroup.procs").read_text() == "42"
    assert (own / "worker-1/pids.max").read_text() == str(MAX_TASKS)
    for models, limit in ((64 * MIB, 64 * MIB), (128 * MIB, 128 * MIB), (MIB, 128 * MIB)):
        group.limit_memory(models)
        assert int((own / "worker-1/memory.max").read_text()) == IDLE_BYTES + limit, "raised, never lowered"
    group.limit_memory(0)
    assert (own / "worker-1/memory.max").read_text() == "max"


def test_version_2_as_systemd_hands_it_over(tmp_path: Path) -> None:
    """Delegate=yes, DelegateSubgroup=supervisor: it stands in a leaf, and another start finds all switched on."""
    base = second(tmp_path, "shoal.service", standing="memory pids", there="")
    (base / "supervisor").mkdir()
    groups = Cgroups.detect(tmp_path, "0::/shoal.service/supervisor\n", PID)
    assert (groups.unsupported_limits, set(groups.parents.values())) == ((), {base})


@pytest.mark.parametrize(
    ("offered", "lacking"), [("cpu", 2), ("memory", 1)], ids=["nothing delegated", "memory delegated"]
)
def test_version_2_tells_what_was_not_delegated(tmp_path: Path, offered: str, lacking: int) -> None:
    second(tmp_path, "a", offered=offered)
    groups = Cgroups.detect(tmp_path, "0::/a\n", PID)
    assert len(groups.unsupported_limits) == lacking
    assert (groups.make("worker-1") is None) == (lacking == 2)


def test_version_2_leaves_other_processes_where_they_are(tmp_path: Path) -> None:
    """A shell's group: the kernel then refuses the switch, which is told."""
    own = second(tmp_path, "user.slice", there=f"1\n{PID}\n")
    (own / "cgroup.subtree_control").unlink()
    groups = Cgroups.detect(tmp_path, "0::/user.slice\n", PID)
    assert not (own / "supervisor").exists()
    assert groups.unsupported_limits
    assert groups.parents == {}


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        (tmp_path / name / "docker/abc").mkdir(parents=True)
    groups = Cgroups.detect(tmp_path, "4:memory:/docker/abc\n8:pids:/docker/abc\n0::/\n", PID)
    assert groups.unsupported_limits == ()
    memory, pids = tmp_path / "memory/docker/abc/worker-1", tmp_path / "pids/docker/abc/worker-1"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    group = groups.make("worker-1")
    assert group is not None
    group.add(42)
    group.limit_memory(MIB)
    assert int((memory / "memory.limit_in_bytes").read_text()) == IDLE_BYTES + MIB
    assert (pids / "pids.max").read_text() == str(MAX_TASKS)
    assert (memory / "cgroup.procs").read_text() == (pids / "cgroup.procs").read_text() == "42"


def test_version_1_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    groups = Cgroups.detect(tmp_path, "4:memory:/docker/abc\n8:pids:/docker/abc\n", PID)
    assert groups.parents == {"memory": tmp_path / "memory"}
    assert len(groups.unsupported_limits) == 1


@pytest.mark.parametrize(
    ("version", "file", "text"),
    [
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"),
        (2, "memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n"),
    ],
)
def test_whom_the_kernel_killed_for_memory_is_counted_by_worker(
    tmp_path: Path, version: int, file: str, text: str
) -> None:
    group = Cgroup({MEMORY: tmp_path}, version)
    assert group.oom_kills() is None, "nobody counts"
    (tmp_path / file).write_text(text)
    assert group.oom_kills() == 1
    (tmp_path / file).write_text(text.replace("oom_kill 1", "oom_kill 0"))
    assert group.oom_kills() == 0
    assert Cgroup({}, version).oom_kills() is None


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    groups = Cgroups.detect(tmp_path, "", PID)
    assert len(groups.unsupported_limits) == 2
    assert groups.make("worker-1") is None


def test_groups_of_workers_that_nobody_saw_end_are_swept(tmp_path: Path) -> None:
    """Only old ones: a young one may be another supervisor's, which has not put its worker there yet."""
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()
    groups = Cgroups.detect(tmp_path, "4:memory:/\n8:pids:/\n", PID)
    old, young, other = (tmp_path / "memory" / name for name in ("worker-old", "worker-young", "system.slice"))
    for folder in (old, young, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    (busy := tmp_path / "memory/worker-busy").mkdir()
    (busy / "cgroup.procs").write_text("42")  # as a kernel refuses to remove what is in use
    os.utime(busy, (0, 0))
    groups.make("worker-1")
    assert [folder.exists() for folder in (old, young, other, busy)] == [False, True, True, True]
