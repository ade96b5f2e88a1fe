"""Derives the profiles of emulated devices: `derive_profiles.py device_catalogue.csv qai_hub_latency.csv.gz`.

The catalogue holds results of MLPerf Inference, SingleStream (one request in flight). An emulated device is fitted to
one row, ResNet-50 v1.5: all rates are that model's work over the row's latency, so the profile gives back its row
exactly and any other model by its FLOPs and bytes. Launch costs are inside these rates. Watts are the row's joules
over its latency, of the whole system at the wall, which `system` names. What the row does not tell (power at idle) is
left out, not guessed; where something else is known of such a system, `SLEEP_POWER` has it, with its source and what
of it is assumed.

The second file holds Qualcomm's own measurements of its phones' NPUs, by ONNX Runtime with QNN. The profile of the NPU
that the vendor's simulator stands for is fitted to two of its models, for each precision: two points give a launch cost
and a rate.
"""

import csv
import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path

LICENCE = (
    "MLPerf Inference results, MLCommons, rearranged by mlcommons/cm4mlperf-results (84d8b84c6d6e), Apache-2.0. "
    "The MLPerf name is a trademark of MLCommons. Not verified by MLCommons; an emulation, not a submission."
)
FLOAT_BYTES = 4
STAGES = ((3, 64, 256, 56), (4, 128, 512, 28), (6, 256, 1024, 14), (3, 512, 2048, 7))
"""Of ResNet-50: blocks, inner channels, outer channels, side of the stage's images (He et al., 2015, table 1)."""


@dataclass(frozen=True)
class ProfileSpec:
    """A profile and the row it comes from (the end of the catalogue's `source`)."""

    # Of the profile, as `--emulate` takes it.
    name: str
    # cpu, gpu or npu.
    kind: str
    # Its maker.
    vendor: str
    # ONNX Runtime's name of the provider that runs on the real device.
    native_provider: str
    # The row of the device catalogue that its latency comes from: the end of `source`.
    row: str
    # The row that its memory comes from; empty: the same one.
    memory_row: str


PROFILE_SPECS = (
    ProfileSpec(
        "nvidia-l4",
        "gpu",
        "NVIDIA",
        "TensorrtExecutionProvider",
        "v3.0/closed/Dell/results/XR5610_L4x1_TRT_MaxQ/resnet50/SingleStream",
        "",
    ),
    ProfileSpec(
        "orin-nx-16g",
        "gpu",
        "NVIDIA",
        "TensorrtExecutionProvider",
        "v3.1/closed/NVIDIA/results/Orin_NX_TRT_MaxQ/resnet50/SingleStream",
        "",
    ),
    ProfileSpec(
        "qualcomm-ai100-dm2",
        "npu",
        "Qualcomm",
        "QNNExecutionProvider",
        "v3.1/closed/Qualcomm/results/gloria_highend/resnet50/singlestream",
        "",
    ),
    ProfileSpec(
        "rk3588s",
        "cpu",
        "Rockchip",
        "ArmNNExecutionProvider",
        "v3.0/closed/Krai/results/firefly-armnn-v22.11-neon/resnet50/singlestream",
        # the same board, in the row of its graphics processor, which alone states the memory
        "v3.0/closed/Krai/results/firefly-armnn-v22.11-opencl/resnet50/singlestream",
    ),
)


@dataclass(frozen=True)
class SleepPower:
    """idle_share: of the watts at work. asleep_w, wake_s: as in `Rest`. source: of each figure."""

    idle_share: float
    asleep_w: float
    wake_s: float
    source: str


SLEEP_POWER = {
    "nvidia-l4": SleepPower(
        16.4 / 104.0,
        20.0,
        260.0,
        "idle: as a share of work, of g4dn.xlarge (NVIDIA T4), 16.4 of 104.0 W, ccf_aws_instance_power.csv.gz "
        "(cloud-carbon-footprint/ccf-coefficients b0032d9); servers at large idle at 60 % and more (Gandhi et al., "
        "AutoScale, ACM TOCS 30:4, 2012), so this spares little; waking: 260 s is assumed, for a server's "
        "start; asleep: 20 W is assumed, for what stays on in a server that is off",
    )
}
"""Profiles that can be put to sleep: whole servers. Of the others nobody says what they draw at rest."""


def sleep_profile(name: str, active_w: float) -> dict[str, object] | None:
    known = SLEEP_POWER.get(name)
    if known is None:
        return None
    return {
        "idle_w": active_w * known.idle_share,
        "asleep_w": known.asleep_w,
        "wake_s": known.wake_s,
        "source": known.source,
    }


def resnet50_work() -> tuple[float, float]:
    """(FLOPs, bytes read and written) of ResNet-50 v1.5 at batch 1, 224 x 224, fp32, batch normalisation folded in.

    A multiply-add is 2 FLOPs. Counted as a ModelProfile counts: each operator reads its inputs and weights and writes
    its outputs.
    """
    flops = moved_elements = 0.0

    def conv(inputs: int, outputs: int, kernel: int, side_in: int, side_out: int) -> None:
        nonlocal flops, moved_elements
        weights = inputs * outputs * kernel**2
        flops += 2.0 * weights * side_out**2
        moved_elements += inputs * side_in**2 + weights + outputs + outputs * side_out**2

    def relu(channels: int, side: int) -> None:
        nonlocal moved_elements
        moved_elements += 2 * channels * side**2

    conv(3, 64, 7, 224, 112)
    relu(64, 112)
    moved_elements += 64 * (112**2 + 56**2)
    channels, side = 64, 56
    for blocks, inner, outer, out in STAGES:
        for block in range(blocks):
            conv(channels, inner, 1, side, side)
            relu(inner, side)
            # v1.5 strides in the 3x3 convolution
            conv(inner, inner, 3, side, out)
            relu(inner, out)
            conv(inner, outer, 1, out, out)
            if block == 0:
                conv(channels, outer, 1, side, out)
            moved_elements += 3 * outer * out**2
            relu(outer, out)
            channels, side = outer, out
    moved_elements += channels * side**2 + channels
    flops += 2.0 * channels * 1000
    moved_elements += channels + channels * 1000 + 2 * 1000
    return flops, moved_elements * FLOAT_BYTES


def profile(spec: ProfileSpec, rows: list[dict[str, str]]) -> dict[str, object]:
    row = _row(spec.row, rows)
    memory = _row(spec.memory_row or spec.row, rows)
    latency_s = float(row["latency_ms"]) / 1e3
    joules = float(row["joules_per_query"])
    flops, moved = resnet50_work()
    sources = [row["source"]] + ([memory["source"]] if memory is not row else [])
    return {
        "name": spec.name,
        "kind": spec.kind,
        "vendor": spec.vendor,
        "model": row["device"],
        "native_provider": spec.native_provider,
        "software": row["software"],
        "memory_bytes": int(float(memory["device_mem_gb"]) * 1e9),
        "parallelism": 1,
        "resnet50_latency_s": latency_s,
        "resnet50_joules": joules,
        "flops_per_s": flops / latency_s,
        "bytes_per_s": moved / latency_s,
        "active_w": joules / latency_s,
        "system": row["host_system"],
        "rest": sleep_profile(spec.name, joules / latency_s),
        "sources": [f"device_catalogue.csv: {source}" for source in sources],
        "licence": LICENCE,
    }


HTP_SOURCE = "qai_hub_latency.csv.gz (quic/ai-hub-models 52c080d245d2, perf.yaml)"
HTP_LICENCE = "Qualcomm AI Hub Models' published measurements, quic/ai-hub-models (52c080d245d2), BSD-3-Clause."
HTP_DEVICE, HTP_RUNTIMES = "Samsung Galaxy S24", {"float": "onnx", "w8a8": "qnn_dlc"}
"""The runtime for each precision that has a row of both models."""
MOBILENET_V2_FLOPS = 2 * 300e6
"""300 million multiply-adds (Sandler et al., 2018, table 4)."""


def htp_profile(rows: list[dict[str, str]]) -> dict[str, object]:
    """Of Snapdragon 8 Gen 3 (SM8650), Hexagon V75. No watts: nobody publishes them."""
    flops, moved = resnet50_work()
    rates: dict[str, float] = {}
    launches: list[float] = []
    sources: list[str] = []
    for precision, runtime in HTP_RUNTIMES.items():
        seconds = {}
        for model in ("resnet50", "mobilenet_v2"):
            key = {"model": model, "device": HTP_DEVICE, "precision": precision, "runtime": runtime}
            (row,) = [row for row in rows if key.items() <= row.items()]
            seconds[model] = float(row["latency_ms"]) / 1e3
            sources.append(f"{HTP_SOURCE}: {model}, {precision}, {HTP_DEVICE}, {runtime}: {row['latency_ms']} ms")
        slope = (flops - MOBILENET_V2_FLOPS) / (seconds["resnet50"] - seconds["mobilenet_v2"])
        rates |= dict.fromkeys(("fp32", "fp16") if precision == "float" else ("int8",), slope)
        launches.append(seconds["resnet50"] - flops / slope)
    launch_s = min(launches)
    return {
        "name": "htp-sim",
        "model": "Hexagon V75 (Snapdragon 8 Gen 3)",
        "soc_model": "57",
        "htp_arch": "75",
        "flops_per_s": rates,
        "bytes_per_s": moved / (flops / rates["fp32"]),
        "launch_s": launch_s,
        "sources": sources,
        "licence": HTP_LICENCE,
    }


def _row(suffix: str, rows: list[dict[str, str]]) -> dict[str, str]:
    (row,) = [row for row in rows if row["source"].endswith(suffix)]
    return row


def main(catalogue: Path, hub: Path, folder: Path) -> None:
    with catalogue.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for spec in PROFILE_SPECS:
        text = json.dumps(profile(spec, rows), indent=2) + "\n"
        (folder / "profiles" / f"{spec.name}.json").write_text(text)
    with gzip.open(hub, "rt", newline="") as file:
        htp = htp_profile(list(csv.DictReader(file)))
    (folder / "plugins" / "htp.json").write_text(json.dumps(htp, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(__file__).parent / "shoal/agent/devices")
