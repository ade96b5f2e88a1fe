"""The host's processor, from trees of /proc and /sys as other machines have them."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.host import Host
from shoal.agent.driver_port import DriverOptions
from shoal.types.codes import Code, ShoalError

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"
XEON = "\n".join(
    f"processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Gold 6230\nphysical id\t: {n // 4}\n"
    f"core id\t\t: {n % 4 // 2}\nflags\t\t: fpu sse4_2 avx avx2 fma avx512f avx512_vnni amx_tile\n"
    for n in range(8)
)
ARM = "\n".join(
    f"processor\t: {n}\nBogoMIPS\t: 48.00\nFeatures\t: fp asimd asimdhp asimddp\nCPU implementer\t: 0x41\n"
    for n in range(4)
)


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def xeon(root: Path) -> Path:
    cache = "sys/devices/system/cpu/cpu0/cache"
    return tree(
        root,
        {
            "proc/cpuinfo": XEON,
            "proc/meminfo": MEMINFO,
            "proc/stat": "cpu  100 10 50 800 40 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1\n",
            "proc/self/cgroup": "0::/\n",
            "proc/sys/kernel/osrelease": "6.1.0-amd64\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
            f"{cache}/index0/level": "1\n",
            f"{cache}/index0/type": "Data\n",
            f"{cache}/index0/size": "32K\n",
            f"{cache}/index3/level": "3\n",
            f"{cache}/index3/type": "Unified\n",
            f"{cache}/index3/size": "28160K\n",
            "sys/class/thermal/thermal_zone0/type": "acpitz\n",
            "sys/class/thermal/thermal_zone0/temp": "27800\n",
            "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
            "sys/class/thermal/thermal_zone1/temp": "61000\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "4\n",
            "sys/class/powercap/intel-rapl:0/name": "package-0\n",
            "sys/class/powercap/intel-rapl:0/energy_uj": "999000000\n",
            "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "1000000000\n",
            "sys/class/powercap/intel-rapl:0:0/name": "core\n",
            "sys/class/powercap/intel-rapl:0:0/energy_uj": "5\n",
            "sys/class/powercap/intel-rapl:1/name": "package-1\n",
            "sys/class/powercap/intel-rapl:1/energy_uj": "0\n",
            "sys/class/powercap/intel-rapl:1/max_energy_range_uj": "1000000000\n",
        },
    )


def test_a_server(tmp_path: Path) -> None:
    (device,) = CpuDriver(ManualClock(), DriverOptions(), xeon(tmp_path)).discover()
    assert (device.name, device.vendor, device.model) == ("cpu0", "GenuineIntel", "Intel(R) Xeon(R) Gold 6230")
    assert (device.driver, device.driver_version) == ("linux", "6.1.0-amd64")
    assert device.runtime_version.startswith("onnxruntime 1.")
    assert device.memory_bytes == 16_000_000 * 1024
    assert device.parallelism == 8
    rapl = tmp_path / "sys/class/powercap"
    assert device.attributes == {
        "isa": "sse4.2 avx avx2 fma avx512f avx512-vnni amx",
        "caches": "L1d 32K, L3 28160K",
        "numa_nodes": "2",
        "cores": "4",
        "threads": "8",
        "energy_counters": f"{rapl}/intel-rapl:0/energy_uj {rapl}/intel-rapl:1/energy_uj",
        "sleep": "no: the agent itself runs on it",
    }


def test_readings_are_of_the_time_between(tmp_path: Path) -> None:
    clock = ManualClock()
    root = xeon(tmp_path)
    driver = CpuDriver(clock, DriverOptions(), root)
    first = driver.read("cpu0")
    assert math.isnan(first.utilisation)
    assert math.isnan(first.power_w)
    assert (first.energy_j, first.temperature_c, first.throttled) == (0, 61, False)
    clock.advance(2.0)
    tree(
        root,
        {
            "proc/stat": "cpu  150 10 50 840 50 0 0 0 0 0\n",
            # package 0 wrapped: 1 J to its range's end, 9 J after
            "sys/class/powercap/intel-rapl:0/energy_uj": "9000000\n",
            "sys/class/powercap/intel-rapl:1/energy_uj": "20000000\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "5\n",
        },
    )
    second = driver.read("cpu0")
    assert second.utilisation == pytest.approx(0.5)
    assert second.energy_j == pytest.approx(30)
    assert second.power_w == pytest.approx(15)
    assert second.throttled
    assert second.free_bytes == 8_000_000 * 1024
    assert second.taken_at == clock.wall()
    with pytest.raises(ShoalError) as lost:
        driver.read("cpu1")
    assert lost.value.code is Code.DEVICE_LOST


@pytest.mark.parametrize("odd", ["1000000\n", "", "-5\n"], ids=["set back", "empty", "below 0"])
def test_a_counter_of_joules_that_is_set_back_counts_on_from_there(tmp_path: Path, odd: str) -> None:
    """As by a suspend. 3 J of the other package are of the same time, which counts for nothing."""
    clock, rapl = ManualClock(), "sys/class/powercap/intel-rapl"
    root = tree(xeon(tmp_path), {f"{rapl}:0/energy_uj": "25000000\n"})
    tree(root, {f"{rapl}:0/max_energy_range_uj": "262143328850\n"})
    driver = CpuDriver(clock, DriverOptions(), root)

    def read_with(first: str, second: str) -> tuple[float, float]:
        clock.advance(0.5)
        tree(root, {f"{rapl}:0/energy_uj": first, f"{rapl}:1/energy_uj": second})
        found = driver.read("cpu0")
        return found.energy_j, found.power_w

    assert read_with("45000000\n", "5000000\n") == pytest.approx((25.0, 50.0))
    assert all(map(math.isnan, read_with(odd, "8000000\n")))
    read_with("2000000\n", "9000000\n")
    energy_j, _ = read_with("3000000\n", "10000000\n")
    later_j, watts = read_with("13000000\n", "11000000\n")
    assert 25.0 < energy_j < 32.0
    assert (later_j - energy_j, watts) == pytest.approx((11.0, 22.0))


def test_a_counter_that_does_not_say_where_it_wraps_is_none(tmp_path: Path) -> None:
    root = xeon(tmp_path)
    (root / "sys/class/powercap/intel-rapl:1/max_energy_range_uj").unlink()
    (device,) = CpuDriver(ManualClock(), DriverOptions(), root).discover()
    assert device.attributes["energy_counters"] == str(root / "sys/class/powercap/intel-rapl:0/energy_uj")


def test_an_arm_board(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": ARM, "proc/meminfo": MEMINFO, "proc/device-tree/model": "Firefly RK3588S\x00"}
    files |= {
        "sys/class/thermal/thermal_zone0/type": "soc-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48300\n",
    }
    driver = CpuDriver(ManualClock(), DriverOptions(), tree(tmp_path, files))
    (device,) = driver.discover()
    assert (device.vendor, device.model) == ("Arm", "Firefly RK3588S")
    assert device.attributes["isa"] == "neon fp16 dotprod"
    assert (device.attributes["cores"], device.attributes["numa_nodes"]) == ("4", "1")
    assert "energy_counters" not in device.attributes
    reading = driver.read("cpu0")
    assert reading.temperature_c == pytest.approx(48.3)
    assert math.isnan(reading.energy_j)
    assert math.isnan(reading.power_w)


ZONES = "sys/class/thermal"


@pytest.mark.parametrize("milli", [-273_200, -274_000, 2**31 - 1])
@pytest.mark.parametrize(("other", "celsius"), [("x86_pkg_temp", 61.0), ("fan", 61.0), ("", math.nan)])
def test_a_zone_without_a_sensor_counts_for_none(tmp_path: Path, milli: int, other: str, celsius: float) -> None:
    """Whether the processor's own zone is the dead one or another."""
    files = {f"{ZONES}/thermal_zone0/type": "acpitz\n", f"{ZONES}/thermal_zone0/temp": f"{milli}\n"}
    if other:
        files |= {f"{ZONES}/thermal_zone1/type": f"{other}\n", f"{ZONES}/thermal_zone1/temp": "61000\n"}
    reading = CpuDriver(ManualClock(), DriverOptions(), tree(tmp_path, files)).read("cpu0")
    assert reading.temperature_c == pytest.approx(celsius, nan_ok=True)


def test_a_limit_that_is_raised_later_is_not_free_memory(tmp_path: Path) -> None:
    """The region knows the device by what it was when its driver found it."""
    group = "sys/fs/cgroup/memory"
    files = {f"{group}.max": "1000000000\n", f"{group}.current": "100000000\n"}
    driver = CpuDriver(ManualClock(), DriverOptions(), tree(xeon(tmp_path), files))
    (device,) = driver.discover()
    assert driver.read("cpu0").free_bytes == 900_000_000
    tree(tmp_path, {f"{group}.max": "4000000000\n"})
    assert driver.read("cpu0").free_bytes == device.memory_bytes == 1_000_000_000


@pytest.mark.parametrize(
    ("line", "utilisation"),
    [
        ("cpu  200 10 50 800 38", 1.0),  # 100 ticks busy, 2 of waiting taken back
        ("cpu  98 10 50 900 40", 0.0),
        ("cpu  150 10 50 840 50", 0.5),
    ],
)
def test_utilisation_is_a_share_whatever_ticks_are_taken_back(tmp_path: Path, line: str, utilisation: float) -> None:
    driver = CpuDriver(ManualClock(), DriverOptions(), xeon(tmp_path))
    tree(tmp_path, {"proc/stat": f"{line} 0 0 0 0 0\n"})
    assert driver.read("cpu0").utilisation == pytest.approx(utilisation)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    driver = CpuDriver(ManualClock(), DriverOptions(), tmp_path)
    (device,) = driver.discover()
    assert (device.vendor, device.parallelism, device.memory_bytes) == ("unknown", 1, 0)
    reading = driver.read("cpu0")
    assert (reading.free_bytes, reading.throttled) == (0, False)
    assert math.isnan(reading.temperature_c)


@pytest.mark.parametrize(
    ("groups", "limit", "free", "cores"),
    [
        # version 2: the tightest of the group and its ancestors; page cache that can be dropped is free
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "4000000000\n",
                "sys/fs/cgroup/a/memory.current": "1000000000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 400000000\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "900000000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            4_000_000_000,
            3_400_000_000,
            2,
        ),
        # version 1, as a container sees it: the path in /proc is the host's, the mount is the group
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2_000_000_000,
            600_000_000,
            1,
        ),
        # version 1 without limits
        (
            {
                "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16_000_000 * 1024,
            8_000_000 * 1024,
            8,
        ),
        # used beyond the limit for a moment
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cgroup.controllers": "memory",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            1000,
            0,
            8,
        ),
    ],
    ids=["v2", "v1-container", "v1-unlimited", "over"],
)
def test_control_groups(tmp_path: Path, groups: dict[str, str], limit: int, free: int, cores: int) -> None:
    host = Host(tree(tmp_path, {"proc/cpuinfo": XEON, "proc/meminfo": MEMINFO} | groups))
    assert (host.limit_bytes(), host.free_bytes(), host.usable_cores()) == (limit, free, cores)
