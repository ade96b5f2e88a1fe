"""Derives the profiles of emulated devices from published results: `cd agents; python -m derive_profiles DATA`.

`DATA` is the folder with `device_catalogue.csv`, `edge_cloud_matrix.csv.gz`, `hailo_fps.csv`, `rknn_fps.csv` and
`qai_hub_latency.csv.gz`.

An emulated device answers in the time that was published for the model, or for its nearest relative (`fit`). Where a
source gives few models of a device, which MLPerf does, its launch is what a query of eight samples costs beyond eight
times the next sample; where it gives many, that of a line through them.

Joules and watts are the rows' own where they have them: of the whole system at the wall, which `system` names. The card
of a server is a profile of its own, with the most that its maker says it draws. What no row tells is left out.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from derive_profiles.fit import Fit, figure_of, fit, pace_error, rate_error, split
from derive_profiles.networks import resnet50_work
from derive_profiles.results import (
    Result,
    Rows,
    hailo_networks,
    hailo_results,
    hub_results,
    matrix_results,
    mlperf_result,
    mlperf_row,
    read_rows,
    rknn_results,
)

MLPERF_LICENCE: Final = (
    "MLPerf Inference results, MLCommons, rearranged by mlcommons/cm4mlperf-results (84d8b84c6d6e), Apache-2.0. "
    "The MLPerf name is a trademark of MLCommons. Not verified by MLCommons; an emulation, not a submission."
)
HAILO_LICENCE: Final = "Hailo Model Zoo's published figures, hailo-ai/hailo_model_zoo (c83fc030e862), MIT."
RKNN_LICENCE: Final = (
    "RKNN Model Zoo's published figures, airockchip/rknn_model_zoo (bad6c73), Apache-2.0; what the networks cost: "
    "hailo-ai/hailo_model_zoo (c83fc030e862), MIT."
)
HUB_LICENCE: Final = "Qualcomm AI Hub Models' published figures, quic/ai-hub-models (52c080d245d2), BSD-3-Clause."
PRECISIONS: Final = ("fp32", "fp16", "int8")
"""In which models are taken. For a precision without results those of another stand: the vendor's compiler chose. What
has no fp32 computes it in fp16, where there are results of that."""
FEW: Final = 5
"""So many results are named one by one in what people see of a device; the profile names all."""


@dataclass(frozen=True)
class Identity:
    """What a profile says of its device, besides figures."""

    # Of the profile, as `--emulate` takes it.
    name: str
    # cpu, gpu or npu.
    kind: str
    # Its maker.
    vendor: str
    # What the maker calls it.
    model: str
    # ONNX Runtime's name of the provider that runs on the real device, or its vendor's runtime.
    native_provider: str
    # What ran the models for the published results.
    software: str
    # Whose results these are, and on what terms.
    licence: str
    # None: it has none of its own and works in its host's.
    memory_bytes: int | None = None
    # Watts at work. NaN: nobody says.
    active_w: float = math.nan
    # Where `active_w` is from, where no row tells joules.
    watts_source: str = ""
    # The system whose power at the wall the joules are. Empty: the device's own.
    system: str = ""
    # As `Rest`, for a system that can be put to sleep.
    rest: Mapping[str, object] | None = None
    # As `DeviceLink`, as its maker publishes it. Empty: nobody says, or it depends on the module.
    links: Sequence[Mapping[str, object]] = ()
    # More keys of the profile.
    more: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Receipt:
    """What the device's capability receipt is to say."""

    # By precision; with `` those of all others.
    lines: Mapping[str, Fit]
    # Where that is from: rows, each.
    rows: Sequence[str]


def receipt_of(fitted: Sequence[Result]) -> Receipt:
    lines = {
        precision: fit([each for each in fitted if each.precision == precision])
        for precision in {each.precision for each in fitted}
    }
    return Receipt(lines, [each.source for each in fitted])


def profile(
    identity: Identity, paced: Sequence[Result], receipt: Receipt, launch_s: float, *, joules: bool = True
) -> dict[str, Any]:
    """joules: whether the results' joules are this device's."""
    figures = [figure_of(each) for each in paced]
    lines = receipt.lines
    flops, moved = resnet50_work()
    rates = {precision: _of_precision(lines, precision) for precision in PRECISIONS}
    pace_median, pace_p90 = pace_error(figures, launch_s)
    found: dict[str, Any] = {
        "name": identity.name,
        "kind": identity.kind,
        "vendor": identity.vendor,
        "model": identity.model,
        "native_provider": identity.native_provider,
        "software": identity.software,
        "memory_bytes": identity.memory_bytes,
        "parallelism": 1,
        "launch_s": launch_s,
        "rates": {
            "flops_per_s": {precision: line.flops_per_s for precision, line in rates.items()},
            # No source tells how fast its memory is: as many bytes for each FLOP as ResNet-50 moves.
            "bytes_per_s": max(line.flops_per_s for line in rates.values()) * moved / flops,
            "launch_s": statistics.median(line.launch_s for line in rates.values()),
            "sources": _sources(receipt.rows),
            "rows": list(receipt.rows),
        },
        "error": {
            "relative_median": pace_median,
            "relative_p90": pace_p90,
            "rates_median": rate_error({each.precision: _of_precision(lines, each.precision) for each in paced}, paced),
        },
        "active_w": identity.active_w,
        "watts_source": identity.watts_source,
        "system": identity.system,
        "rest": identity.rest,
        "links": list(identity.links),
        "sources": _sources([each.source for each in paced]),
        "licence": identity.licence,
        "figures": [
            {**asdict(each), "joules": each.joules if joules else math.nan, "source": result.source}
            for each, result in zip(figures, paced, strict=True)
        ],
        **identity.more,
    }
    return {key: _without_nan(value) for key, value in found.items()}


def _sources(rows: Sequence[str]) -> list[str]:
    """Each row; of many, their files."""
    if len(rows) <= FEW:
        return list(rows)
    files = [row.partition(":")[0] for row in rows]
    return [
        f"{count} models of {file}" if (count := files.count(file)) > 1 else rows[files.index(file)]
        for file in dict.fromkeys(files)
    ]


def _of_precision(lines: Mapping[str, Fit], precision: str) -> Fit:
    nearest = lines.get("fp16") if precision == "fp32" else None
    return lines.get(precision) or lines.get("") or nearest or lines[max(lines)]


def _without_nan(value: object) -> object:
    """NaN as null: JSON has none."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _launch_of_mlperf(rows: Rows, system: str) -> float:
    """Of one query of eight samples (MultiStream) and one of one: what the first sample takes beyond each other."""
    one = float(mlperf_row(rows, system, "resnet50", "singlestream")["latency_ms"]) / 1e3
    eight = float(mlperf_row(rows, system, "resnet50", "multistream")["latency_ms"]) / 1e3
    return max(0.0, one - (eight - one) / 7)


def _watts(results: Sequence[Result]) -> float:
    known = [each.joules / each.latency_s for each in results if not math.isnan(each.joules)]
    return statistics.median(known) if known else math.nan


@dataclass(frozen=True)
class MlperfSystem:
    """A device of MLPerf Inference's closed division, and where its figures are: ends of paths in the results."""

    # Of the profile.
    name: str
    # cpu, gpu or npu.
    kind: str
    # Its maker.
    vendor: str
    # As in Identity.
    native_provider: str
    # ResNet-50 and BERT there pace it.
    paced: str
    # RetinaNet there, which paces nothing, gives the receipt's rates.
    rates: str
    # ResNet-50 there, on the same chip in another system, gives the receipt's launch.
    launch: str
    # Whether the profile is of the card alone: without its server's joules.
    is_card: bool = False
    # As in Identity.
    links: Sequence[Mapping[str, object]] = ()


_TENSORRT: Final = "TensorrtExecutionProvider"
_L4: Final = MlperfSystem(
    "nvidia-l4",
    "gpu",
    "NVIDIA",
    _TENSORRT,
    "v3.0/closed/Dell/results/XR5610_L4x1_TRT_MaxQ",
    "v3.1/closed/Dell/results/XR5610_L4x1_TRT_MaxQ",
    "v3.0/closed/xFusion/results/L4x6_2288H_V7_TRT",
    is_card=True,
    links=(
        {
            "name": "PCIe 4.0 x16",
            "bytes_per_s": 16e9 * 16 * 128 / 130 / 8,  # as devices.topology counts
            "source": "published: nvidia.com/en-us/data-center/l4, PCIe Gen4 x16",
        },
    ),
)
MLPERF_SYSTEMS: Final = (
    _L4,
    replace(_L4, name="xr5610-l4", is_card=False),
    MlperfSystem(
        "orin-nx-16g",
        "gpu",
        "NVIDIA",
        _TENSORRT,
        "v3.1/closed/NVIDIA/results/Orin_NX_TRT_MaxQ",
        "v3.1/closed/NVIDIA/results/Orin_NX_TRT_MaxQ",
        "v3.0/closed/NVIDIA/results/Orin_NX_TRT",
    ),
    MlperfSystem(
        "qualcomm-ai100-dm2",
        "npu",
        "Qualcomm",
        "QNNExecutionProvider",
        "v3.1/closed/Qualcomm/results/gloria_highend",
        "v3.1/closed/Qualcomm/results/gloria_highend",
        "v3.0/closed/Qualcomm/results/heimdall-qaic-v1.8.3.7-aic100",
    ),
)


def mlperf_profile(rows: Rows, system: MlperfSystem) -> dict[str, Any]:
    """Two networks pace it, a third gives the rates of its receipt."""
    paced = [mlperf_result(rows, system.paced, model) for model in ("resnet50", "bert-99")]
    fitted = mlperf_result(rows, system.rates, "retinanet")
    launch_s = _launch_of_mlperf(rows, system.launch)
    line = Fit(launch_s, fitted.network.flops / (fitted.latency_s - launch_s))
    row = mlperf_row(rows, system.paced, "resnet50", "singlestream")
    active_w = float(row["tdp_w"]) if system.is_card else _watts(paced[:1])
    identity = Identity(
        system.name,
        system.kind,
        system.vendor,
        row["device"],
        system.native_provider,
        row["software"],
        MLPERF_LICENCE,
        memory_bytes=int(float(row["device_mem_gb"]) * 1e9),
        active_w=active_w,
        watts_source="watts: the most that the card draws (thermal design power)" if system.is_card else "",
        system="" if system.is_card else row["host_system"],
        rest=_rest_of_server(active_w) if system.name == "xr5610-l4" else None,
        links=system.links,
    )
    receipt = Receipt({"": line}, [fitted.source, f"launch: device_catalogue.csv: {system.launch}/resnet50"])
    launch_s = _launch_of_mlperf(rows, system.paced)
    return profile(identity, paced, receipt, launch_s, joules=not system.is_card)


def _rest_of_server(active_w: float) -> Mapping[str, object]:
    """Of no system of these results it is told what it draws at rest."""
    return {
        "idle_w": active_w * 16.4 / 104.0,
        "asleep_w": 20.0,
        "wake_s": 260.0,
        "source": "idle: as a share of work, of g4dn.xlarge (NVIDIA T4), 16.4 of 104.0 W, "
        "ccf_aws_instance_power.csv.gz (cloud-carbon-footprint/ccf-coefficients b0032d9); servers at large idle at "
        "60 % and more (Gandhi et al., AutoScale, ACM TOCS 30:4, 2012), so this spares little; waking: 260 s is "
        "assumed, for a server's start; asleep: 20 W is assumed, for what stays on in a server that is off",
    }


def board_profile(matrix: Rows, catalogue: Rows) -> dict[str, Any]:
    """The processor of a board, with joules for each network."""
    system = "Firefly-RK3588S"
    results = [each for each in matrix_results(matrix, system, "cpu") if each.model != "resnet50"]
    row = "v3.0/closed/Krai/results/firefly-armnn-v22.11-neon"
    # of the row of its graphics processor, which alone states the memory
    memory = mlperf_row(catalogue, row.replace("neon", "opencl"), "resnet50", "singlestream")["device_mem_gb"]
    paced, fitted = split(results)
    closed = mlperf_result(catalogue, row, "resnet50")
    paced = [*paced, Result(closed.model, closed.network, "fp32", closed.latency_s, closed.joules, closed.source)]
    identity = Identity(
        "rk3588s",
        "cpu",
        "Rockchip",
        "RockChip RK3588S: Arm Cortex-A76 (big); Arm Cortex-A55 (LITTLE)",
        "ArmNNExecutionProvider",
        "ArmNN v22.11 (Neon), TFLite v2.11.0 (ruy)",
        MLPERF_LICENCE,
        memory_bytes=int(float(memory) * 1e9),
        active_w=_watts(fitted),
        system=f"{system} (firefly)",
    )
    return profile(identity, paced, receipt_of(fitted), fit(paced).launch_s)


def hailo_profile(rows: Rows, name: str, device: str, model: str, memory_bytes: int | None) -> dict[str, Any]:
    paced, fitted = split(hailo_results(rows, device))
    identity = Identity(
        name, "npu", "Hailo", model, "HailoRT", "Hailo Dataflow Compiler", HAILO_LICENCE, memory_bytes=memory_bytes
    )
    return profile(identity, paced, receipt_of(fitted), fit(paced).launch_s)


def rknn_profile(rows: Rows, hailo: Rows) -> dict[str, Any]:
    paced, fitted = split(rknn_results(rows, "RK3588 @single_core", hailo_networks(hailo)))
    identity = Identity(
        "rk3588-npu",
        "npu",
        "Rockchip",
        "RK3588 NPU, one of three cores",
        "RKNN",
        "RKNN-Toolkit2",
        RKNN_LICENCE,
    )
    return profile(identity, paced, receipt_of(fitted), fit(paced).launch_s)


def hub_profile(rows: Rows) -> dict[str, Any]:
    """Of the NPU of Snapdragon 8 Gen 3 (SM8650), Hexagon V75, whose simulator `plugins.qnn` offers."""
    paced, fitted = split(hub_results(rows, "Samsung Galaxy S24", "onnx"))
    identity = Identity(
        "htp-sim",
        "npu",
        "Qualcomm",
        "Hexagon V75 (Snapdragon 8 Gen 3)",
        "QNNExecutionProvider",
        "ONNX Runtime with QNN, on Samsung Galaxy S24",
        HUB_LICENCE,
        more={"soc_model": "57", "htp_arch": "75"},
    )
    return profile(identity, paced, receipt_of(fitted), fit(paced).launch_s)


def main(data: Path, folder: Path) -> None:
    catalogue, hailo = read_rows(data / "device_catalogue.csv"), read_rows(data / "hailo_fps.csv")
    profiles = [
        *(mlperf_profile(catalogue, each) for each in MLPERF_SYSTEMS),
        board_profile(read_rows(data / "edge_cloud_matrix.csv.gz"), catalogue),
        hailo_profile(hailo, "hailo-8", "HAILO8", "Hailo-8", None),
        hailo_profile(hailo, "hailo-8l", "HAILO8L", "Hailo-8L", None),
        hailo_profile(hailo, "hailo-10h", "HAILO10H", "Hailo-10H, the smaller of two memories", 4 * 2**30),
        rknn_profile(read_rows(data / "rknn_fps.csv"), hailo),
    ]
    for each in profiles:
        _write(folder / "profiles" / f"{each['name']}.json", each)
    simulator = hub_profile(read_rows(data / "qai_hub_latency.csv.gz"))
    _write(folder / "plugins" / "htp.json", simulator)
    print("| Profile | Paced by | Rates by | Nearest relative: median, 90 % | Rates: median |")
    print("| --- | --- | --- | --- | --- |")
    for each in (*profiles, simulator):
        error = each["error"]
        relative = [f"x {error[name]:.2f}" if error[name] else "-" for name in ("relative_median", "relative_p90")]
        print(
            f"| `{each['name']}` | {len(each['figures'])} | {len(each['rates']['rows'])} | {', '.join(relative)} "
            f"| x {error['rates_median']:.2f} |"
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    """A figure in a line."""
    figures = ",\n".join(f"    {json.dumps(each)}" for each in content["figures"])
    head = json.dumps({**content, "figures": []}, indent=2)
    path.write_text(head.replace('"figures": []', f'"figures": [\n{figures}\n  ]') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parents[1] / "shoal/agent/devices")
