"""A machine with systemd as its first process: this machine's files with temporary changes, and its own processes,
network, mounts and control groups.

Needs root, overlayfs, util-linux, iproute2 and systemd.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from harness.wait import wait_until

BOOTS_WITHIN_S: Final = 60.0
TARGET: Final = "basic.target"
_TREE: Final = Path(__file__).parents[3]
"""What is installed: in sight also where it lies in /tmp, which is empty there."""
_UNIFIED: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_BOOT: Final = """
set -eu
work=$1
mount -t tmpfs -o size=4g,mode=755 none "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o lowerdir=/,upperdir="$work/upper",workdir="$work/work" none "$work/root"
cd "$work/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 none dev
for name in null zero full random urandom tty; do
    touch dev/$name
    mount --bind /dev/$name dev/$name
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 none dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 none run
mount -t tmpfs -o mode=1777 none tmp
case "$3" in /tmp/*)
    mkdir -p "$work/tree" "$work/beside" ".$3"
    mount -t overlay -o lowerdir="$3",upperdir="$work/tree",workdir="$work/beside" none ".$3"
esac
ip link set lo up
rm -rf etc/systemd/system/*.wants etc/machine-id etc/fstab var/log/journal
touch etc/machine-id
mkdir run/old
pivot_root . run/old
cd /
umount -l /run/old
rmdir /run/old
exec env -i container=shoal PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit="$2" --log-target=null --show-status=no
"""
"""What a container that runs systemd promises it: its own /dev, and a /sys and /proc/sys that nobody writes to."""


class SystemdMachine:
    """pid: of its first process, as this machine counts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(
        self, *command: str, stdin: str = "", environment: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside."""
        inside = ["nsenter", f"--target={self.pid}", "--all", "--root", "--wd", *command]
        return subprocess.run(
            inside,
            input=stdin,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def run_checked(self, *command: str, stdin: str = "", timeout: float = 300.0) -> str:
        """The command's output. An assertion fails if it fails."""
        done = self.run(*command, stdin=stdin, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def path(self, inside: str) -> Path:
        """A file inside, as a path on this machine."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def show(self, unit: str, field: str) -> str:
        return self.run_checked("systemctl", "show", f"--property={field}", "--value", unit).strip()

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout


@contextmanager
def boot_machine() -> Iterator[SystemdMachine]:
    """Nothing of it is left afterwards."""
    work = Path(tempfile.mkdtemp(prefix="shoal-machine-", dir="/tmp"))
    group = _group(work.name)
    try:
        with (work.with_suffix(".log")).open("wb") as log:
            process = subprocess.Popen(
                [
                    "sh", "-c", 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"', "sh", str(group),
                    "unshare", "--fork", "--kill-child", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup",
                    "sh", "-c", _BOOT, "sh", str(work), TARGET, str(_TREE),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            yield _up(process, work.with_suffix(".log"))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        _remove(group)
        shutil.rmtree(work, ignore_errors=True)
        work.with_suffix(".log").unlink(missing_ok=True)


def _up(process: subprocess.Popen[bytes], log: Path) -> SystemdMachine:
    def first() -> int:
        assert process.poll() is None, log.read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    machine = SystemdMachine(wait_until(first, BOOTS_WITHIN_S, "its first process"))

    def boots() -> bool:
        assert process.poll() is None, log.read_text()
        name = Path(f"/proc/{machine.pid}/comm").read_text().strip()
        return name == "systemd" and machine.run("systemctl", "--quiet", "is-active", TARGET).returncode == 0

    wait_until(boots, BOOTS_WITHIN_S, "systemd to have booted")
    return machine


def _group(name: str) -> Path:
    root = next((path for path in _UNIFIED if (path / "cgroup.controllers").exists()), None)
    assert root is not None, "control groups version 2 are not mounted"
    group = root / name
    group.mkdir()
    return group


def _remove(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            (Path(folder) / "cgroup.kill").write_text("1")

    def try_remove() -> bool:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
        return not group.exists()

    wait_until(try_remove, BOOTS_WITHIN_S, "its control groups to be empty")
