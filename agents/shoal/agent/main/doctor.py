"""`shoal-agent doctor`: checks this node part by part. Each failure comes with the command that fixes it. Changes
nothing."""

import asyncio
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shoal.agent.clock import SystemClock
from shoal.agent.devices.installed import installed_drivers
from shoal.agent.devices.process import DriverProcess
from shoal.agent.driver_port import DriverOptions
from shoal.agent.identity import enrolment
from shoal.agent.journal.files import SLOTS
from shoal.agent.journal.slots import corrupt_copies
from shoal.agent.link.credentials import CredentialFiles, check_coordinator
from shoal.agent.worker import confinement
from shoal.host import logs
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import show_bytes
from shoal.wire.identity import check_validity

MIN_FREE_BYTES: Final = 256 * 2**20

Finding = str | Refusal
"""What is well, or a refusal that says what is wrong and how to fix it."""


def doctor(state_dir: Path, coordinator: str) -> int:
    """Print one line per check. Returns 0 if all succeed."""
    logs.configure("warning", process="doctor")
    ill = False
    for name, check in _checks(state_dir, coordinator):
        try:
            found = check()
        except ShoalError as error:
            found = error.refusal
        ill |= isinstance(found, Refusal)
        print(f"{'FAIL' if isinstance(found, Refusal) else 'ok  '}  {name:<12} {found}")
    return int(ill)


def _checks(state_dir: Path, coordinator: str) -> tuple[tuple[str, Callable[[], Finding]], ...]:
    files, clock = CredentialFiles(state_dir / "identity"), SystemClock()
    return (
        ("enrolment", lambda: _enrolment(state_dir)),
        ("certificate", lambda: _certificate(files, clock)),
        ("key", lambda: _key(files)),
        ("journal", lambda: _journal(state_dir / "journal")),
        ("disk", lambda: _disk(state_dir)),
        ("sandbox", _sandbox),
        ("devices", lambda: _devices(clock)),
        ("coordinator", lambda: _coordinator(files, coordinator or enrolment.load(state_dir).coordinator, clock)),
    )


def _enrolment(state_dir: Path) -> Finding:
    member = enrolment.load(state_dir)
    return f"{member.role} {member.name} of region {member.region}"


def _certificate(files: CredentialFiles, clock: SystemClock) -> Finding:
    identity = files.identity()
    days = (identity.not_after - clock.wall()) / 86400
    return check_validity(identity, clock.wall()) or f"{identity.uri}, valid for {days:.1f} days"


def _key(files: CredentialFiles) -> Finding:
    try:
        mode = stat.S_IMODE(files.key.stat().st_mode)
    except OSError as error:
        return Refusal(Code.UNAUTHENTICATED, f"key.pem: {error.strerror}", "the node's key", "run shoal-agent join")
    if mode & 0o077:
        return Refusal(Code.ROLE_DENIED, f"key.pem has mode {mode:o}", "600", f"chmod 600 {files.key}")
    return "only its owner reads it"


def _journal(folder: Path) -> Finding:
    bad = [path.name for name in SLOTS for path in corrupt_copies(folder, name)]
    if bad:
        return Refusal(
            Code.STATE_CORRUPT,
            f"{', '.join(bad)} does not verify",
            "verified copies",
            "look at the disk; the agent sets it aside at its next start and asks the coordinator again",
        )
    return "verified"


def _disk(state_dir: Path) -> Finding:
    free = shutil.disk_usage(state_dir if state_dir.exists() else state_dir.anchor).free
    if free < MIN_FREE_BYTES:
        return Refusal(
            Code.DISK_FULL,
            f"{show_bytes(free)} free",
            f"at least {show_bytes(MIN_FREE_BYTES)}",
            f"free space for {state_dir}",
        )
    return f"{show_bytes(free)} free"


def _sandbox() -> Finding:
    lacking = confinement.unsupported_restrictions()
    if lacking:
        return Refusal(
            Code.NOT_CONFINED,
            f"workers here cannot be kept from: {'; '.join(lacking)}",
            "workers without network, others' files, other processes and more memory than theirs",
            "see docs/guides/hardening.md",
        )
    return "workers have no network, no files but theirs, no other processes, and a limit on memory"


def _devices(clock: SystemClock) -> Finding:
    drivers = [
        DriverProcess(name, factory, DriverOptions(), clock, lambda: None)
        for name, factory in installed_drivers(cpu=True).items()
    ]
    asyncio.run(_start_and_end(drivers))
    silent = [each.name for each in drivers if each.is_silent]
    if silent:
        return Refusal(
            Code.DEVICE_UNREACHABLE, f"driver {', '.join(silent)}", "an answer", "see what it wrote to standard error"
        )
    found = [
        f"{device.name} ({device.model}, {show_bytes(device.memory_bytes)})"
        for driver in drivers
        for device in driver.discover()
    ]
    return ", ".join(found) or Refusal(
        Code.NO_CANDIDATE,
        "no device",
        "a device and its runtime",
        "install the extra `cpu` from where the agent came from: docs/guides/devices.md",
    )


async def _start_and_end(drivers: Sequence[DriverProcess]) -> None:
    asking = [asyncio.create_task(each.run()) for each in drivers]
    await asyncio.gather(*(each.wait_started() for each in drivers))
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


def _coordinator(files: CredentialFiles, address: str, clock: SystemClock) -> Finding:
    return (
        asyncio.run(check_coordinator(files, address, clock.wall())) or f"{address} answers, each side trusts the other"
    )
