"""`shoal bench prediction --published`: the files that it reads, and the predictors it stands beside."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.benchmark_modules import load_benchmark
from shoal.coordinator.core.prediction.transfer.known import KnownLatencies
from shoal.types.codes import Code, ShoalError

PARTS = ("architectures", "peers", "tables", "published")
HUB_HEADER = "model,component,precision,device,runtime,latency_ms,compute_unit"
SKIPPED = "|skip_connect~0|+|none~0|none~1|+|none~0|none~1|none~2|"
CONVOLVED = "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|skip_connect~1|none~2|"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The benchmark's modules by name."""
    return load_benchmark(monkeypatch, "_prediction", PARTS)


def hub_line(model: int, device: str, latency: object, runtime: str = "onnx", unit: str = "NPU") -> str:
    return f"net{model},body,float,{device},{runtime},{latency},{unit}"


@pytest.fixture
def data(tmp_path: Path, parts: dict[str, Any]) -> Path:
    """Small files in place of the published ones, as the sources' columns are."""
    tables = parts["tables"]
    rows = [hub_line(model, f"phone{device}", 1 + model + device) for model in range(60) for device in range(5)]
    write(tmp_path / tables.HUB_FILE, [HUB_HEADER, *rows])
    for name, archs in (
        (tables.NASBENCH_FILE, [SKIPPED, CONVOLVED]),
        (tables.FBNET_FILE, ["skip " * 22, "k3_e6 " * 22]),
    ):
        lines = [f"{arch.strip()},{number + 1},{number + 2},{number + 3}" for number, arch in enumerate(archs)]
        write(tmp_path / name, ["arch,gpu_1,gpu_32,board_4", *lines])
    return tmp_path


def write(path: Path, lines: list[str]) -> None:
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def test_tables_are_by_runtime_and_unit(parts: dict[str, Any], data: Path) -> None:
    hub, nasbench, fbnet = parts["tables"].published_tables(data, ["onnx"])
    assert hub.name == "AI Hub onnx NPU"
    assert hub.known.log_seconds.shape == (60, 5)
    assert hub.known.log_seconds[0, 0] == pytest.approx(math.log(0.001))
    assert (nasbench.name, fbnet.name) == ("NAS-Bench-201", "FBNet")
    assert nasbench.known.families == ("gpu", "gpu", "board_4")
    assert parts["tables"].published_tables(data, ["qnn_dlc"])[0].name == "NAS-Bench-201"


def test_an_unseen_device_is_judged_on_what_its_file_rightly_says(parts: dict[str, Any], data: Path) -> None:
    bad = [hub_line(number, "new", latency) for number, latency in enumerate(["nan", -1, 0, "inf", 1e12, "fast", ""])]
    good = [hub_line(number, "new", 2 * (number + 1)) for number in range(7, 60)]
    unknown = hub_line(99, "new", 5)
    write(data / "new.csv", [HUB_HEADER, *bad, *good, unknown, hub_line(3, "new", 5, unit="CPU")])
    (device,) = parts["tables"].read_unseen(data / "new.csv", data)
    assert (device.name, int((~np.isnan(device.seconds)).sum())) == ("new", 53)
    found = list(parts["published"].device_errors(device, device.table.known, 2, 0))
    assert [each.measured for each in found] == [0, 5, 10]
    assert found[-1].mape < 5
    line = parts["published"].summary(found)
    assert line["cases"] == 3
    assert line["published"]["AI Hub onnx NPU k=10"]["roofline"] is None


def test_an_unseen_device_may_have_architectures(parts: dict[str, Any], data: Path) -> None:
    write(data / "new.csv", ["arch,mine", f"{CONVOLVED},4", "elsewhere,3"])
    (device,) = parts["tables"].read_unseen(data / "new.csv", data)
    assert (device.name, device.table.name) == ("mine", "NAS-Bench-201")
    assert np.isnan(device.seconds[0])
    assert device.seconds[1] == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", Code.FIELD_INVALID),
        (b"model,device\n1,2", Code.FIELD_INVALID),
        (b"arch,mine\n1,2\n1", Code.FIELD_INVALID),
        (b"arch,mine\n\xff,2", Code.FIELD_INVALID),
        (b"a," * 300 + b"\n1,2", Code.FIELD_INVALID),
        (None, Code.NOT_FOUND),
    ],
)
def test_a_file_that_is_none_has_a_code(parts: dict[str, Any], data: Path, content: bytes | None, code: Code) -> None:
    if content is not None:
        (data / "new.csv").write_bytes(content)
    with pytest.raises(ShoalError) as refused:
        parts["tables"].read_unseen(data / "new.csv", data)
    assert refused.value.refusal.code == code


def test_work_is_that_of_the_papers(parts: dict[str, Any]) -> None:
    work = parts["architectures"].nasbench_work([SKIPPED, CONVOLVED])
    one = sum(2 * 9 * channels**2 * side**2 for channels, side in ((16, 32), (32, 16), (64, 8)))
    assert work.flops.tolist() == [0, 5 * one]
    assert work.bytes[1] > work.bytes[0] > 0
    fbnet = parts["architectures"].fbnet_work(["skip " * 22, "k3_e1 " * 22, "k3_e6 " * 22, "k3_e1_g2 " * 22])
    assert fbnet.flops[0] == 0
    assert fbnet.flops[2] > 4 * fbnet.flops[1]
    assert fbnet.flops[3] < fbnet.flops[1]


def test_features_tell_what_a_cell_does_not_use(parts: dict[str, Any]) -> None:
    used, unused = parts["architectures"].nasbench_features(
        [CONVOLVED, "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|"]
    )
    assert used[-1] == unused[-1] == 1
    assert not np.array_equal(used, unused)
    assert parts["architectures"].nasbench_features([SKIPPED])[0, -1] == 0


def test_peers_find_their_own_law(parts: dict[str, Any]) -> None:
    peers, chance = parts["peers"], np.random.default_rng(0)
    flops, moved = chance.uniform(1e9, 9e9, (2, 40))
    work = parts["architectures"].Work(flops, moved)
    seconds = 0.002 + flops / 1e12 + moved / 5e10
    rows, asked = np.arange(10), np.arange(10, 40)
    assert peers.roofline(work, rows, seconds[rows], asked) == pytest.approx(seconds[asked])
    logs = chance.normal(0, 1, (40, 4))
    known = KnownLatencies(tuple("abcd"), tuple("abcd"), logs, np.empty((40, 0)))
    copied = peers.nearest_device(known, logs, "new", rows, logs[rows, 2] + 1, asked)
    assert copied == pytest.approx(logs[asked, 2] + 1)
    mixed = logs @ np.array([0.5, 0.2, 0.1, 0.1])
    assert peers.ridge(logs, rows, mixed[rows], asked) == pytest.approx(mixed[asked], abs=0.05)
    assert peers.ridge(logs, rows[:0], mixed[:0], asked) == pytest.approx(logs[asked].mean(1))
