"""The machine as /proc and /sys describe it: processors, caches, memory, cgroups, temperature, energy counters.

All paths are below `root`, so that tests can describe other machines. A missing value is None, empty or NaN.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.types.readings import LEAST_CELSIUS, MOST_CELSIUS

_UNLIMITED: Final = 2**60
"""cgroup v1 files hold about 2^63 if there is no limit."""
_ISA: Final = {
    "sse4_2": "sse4.2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512-vnni",
    "avx_vnni": "avx-vnni",
    "avx512_bf16": "avx512-bf16",
    "amx_tile": "amx",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}
"""Flags of /proc/cpuinfo that matter to inference, with their usual names."""
_ARM_MAKERS: Final = {
    "0x41": "Arm",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}
_ZONES: Final = ("x86_pkg_temp", "cpu", "soc", "acpitz")


@dataclass(frozen=True, slots=True)
class Processor:
    """The machine's processors."""

    # `vendor_id` of x86, or the Arm implementer; "unknown" if neither is known.
    vendor: str
    # Model name, or the board's name on Arm; "unknown" if neither is known.
    model: str
    # Instruction set extensions that matter to inference, by the names in _ISA.
    isa: tuple[str, ...]
    # Logical processors (hardware threads), at least 1.
    threads: int
    # Physical cores, at least 1.
    cores: int
    # Sizes like `L1d 32K`, one per level and kind.
    caches: tuple[str, ...]
    # NUMA nodes, at least 1.
    numa_nodes: int
    # Kernel release, as in `uname -r`. Empty if unknown.
    kernel: str


class Host:
    """Reads the files on every call and caches nothing."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def processor(self) -> Processor:
        blocks = [block for block in _text(self._root / "proc/cpuinfo").split("\n\n") if block.strip()]
        first = _fields(blocks[0]) if blocks else {}
        flags = set((first.get("flags") or first.get("Features") or "").split())
        cores = {
            (fields.get("physical id", "0"), fields.get("core id", str(n)))
            for n, fields in enumerate(map(_fields, blocks))
        }
        maker = _ARM_MAKERS.get(first.get("CPU implementer", ""), "")
        board = _text(self._root / "proc/device-tree/model").strip("\0\n")
        return Processor(
            vendor=first.get("vendor_id", maker or "unknown"),
            model=first.get("model name", board or "unknown"),
            isa=tuple(name for flag, name in _ISA.items() if flag in flags),
            threads=len(blocks) or 1,
            cores=len(cores) or 1,
            caches=self._caches(),
            numa_nodes=len(list((self._root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
            kernel=_text(self._root / "proc/sys/kernel/osrelease").strip(),
        )

    def total_bytes(self) -> int:
        return self._meminfo("MemTotal")

    def limit_bytes(self) -> int:
        """The machine's memory, or the lowest limit of this process's cgroups if that is less."""
        limits = [group.limit for group in self._memory_groups() if group.limit < _UNLIMITED]
        return min([self.total_bytes(), *limits])

    def free_bytes(self) -> int:
        """Bytes that can still be allocated, on the machine and within every cgroup. Page cache that can be dropped
        counts as free."""
        rooms = [group.limit - group.used for group in self._memory_groups() if group.limit < _UNLIMITED]
        return max(0, min([self._meminfo("MemAvailable"), *rooms]))

    def usable_cores(self) -> int:
        """Processors that this process may use: by affinity and cgroup quota, rounded up; at least 1."""
        present = self.processor().threads
        allowed = len(os.sched_getaffinity(0)) if self._root == Path("/") else present
        quotas = [quota for quota in self._cpu_quotas() if quota > 0]
        return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))

    def busy_and_total(self) -> tuple[int, int]:
        """Clock ticks of all processors since boot: (busy, all). (0, 0) if unknown."""
        line = _text(self._root / "proc/stat").split("\n", 1)[0].split()[1:9]
        if len(line) < 8:
            return 0, 0
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, line)
        busy = user + nice + system + irq + softirq
        return busy, busy + idle + iowait + steal

    def temperature_c(self) -> float:
        """Temperature of the processor's own zone, or else of the hottest zone. NaN if there is none. A zone whose
        sensor is not there, or off, shows what no zone can have (ACPI: 0 K), and counts for none."""
        found: dict[str, float] = {}
        for zone in sorted((self._root / "sys/class/thermal").glob("thermal_zone*")):
            kind = _text(zone / "type").strip()
            value = _text(zone / "temp").strip()
            celsius = int(value) / 1000 if value.lstrip("-").isdigit() else math.nan
            if LEAST_CELSIUS <= celsius <= MOST_CELSIUS:
                found[kind] = max(found.get(kind, -math.inf), celsius)
        for wanted in _ZONES:
            own = [value for kind, value in found.items() if kind.startswith(wanted)]
            if own:
                return max(own)
        return max(found.values(), default=math.nan)

    def throttle_count(self) -> int:
        """How many times the processors have throttled for heat since boot."""
        pattern = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count"
        return sum(int(text) for path in self._root.glob(pattern) if (text := _text(path).strip()).isdigit())

    def energy_counters(self) -> tuple[Path, ...]:
        """RAPL counter of each package that this process may read, and which says where it wraps. On many machines
        only root may."""
        zones = sorted((self._root / "sys/class/powercap").glob("intel-rapl:[0-9]*"))
        counters = [
            zone / "energy_uj"
            for zone in zones
            if zone.name.count(":") == 1 and _text(zone / "name").startswith("package")
        ]
        return tuple(
            counter
            for counter in counters
            if all(_text(file).strip().isdigit() for file in (counter, counter.with_name("max_energy_range_uj")))
        )

    def _caches(self) -> tuple[str, ...]:
        found = {}
        for index in sorted((self._root / "sys/devices/system/cpu/cpu0/cache").glob("index[0-9]*")):
            kind = {"Data": "d", "Instruction": "i"}.get(_text(index / "type").strip(), "")
            found[f"L{_text(index / 'level').strip()}{kind}"] = _text(index / "size").strip()
        return tuple(f"{name} {size}" for name, size in found.items() if size)

    def _meminfo(self, field: str) -> int:
        for line in _text(self._root / "proc/meminfo").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        return 0

    def _memory_groups(self) -> list["_Group"]:
        groups = []
        for folder in self._groups(""):
            limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
            if limit.isdigit() and used.isdigit():
                cache = _stat(folder, "inactive_file")
                groups.append(_Group(int(limit), max(0, int(used) - cache)))
        for folder in self._groups("memory"):
            limit = _text(folder / "memory.limit_in_bytes").strip()
            used = _text(folder / "memory.usage_in_bytes").strip()
            if limit.isdigit() and used.isdigit():
                cache = _stat(folder, "total_inactive_file")
                groups.append(_Group(int(limit), max(0, int(used) - cache)))
        return groups

    def _cpu_quotas(self) -> list[float]:
        quotas = []
        for folder in self._groups(""):
            quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
        for folder in self._groups("cpu"):
            quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
        return quotas

    def _groups(self, controller: str) -> list[Path]:
        """This process's cgroup of a v1 controller (v2 if `controller` is empty) and its ancestors.

        In a container the path in /proc/self/cgroup is often the host's; then the mount itself is the cgroup.
        """
        base = self._root / "sys/fs/cgroup"
        if controller:
            base = base / controller
        elif (base / "unified/cgroup.controllers").exists():
            base = base / "unified"
        path = None
        for line in _text(self._root / "proc/self/cgroup").splitlines():
            _, controllers, name = line.split(":", 2)
            if controller in controllers.split(","):
                path = name.strip("/")
        if path is None:
            return []
        parts = [base]
        for part in Path(path).parts:
            parts.append(parts[-1] / part)
        return [folder for folder in parts if folder.is_dir()]


@dataclass(frozen=True, slots=True)
class _Group:
    """Memory of one cgroup in bytes; `used` excludes inactive file cache."""

    limit: int
    used: int


def _stat(folder: Path, field: str) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return int(value)
    return 0


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
