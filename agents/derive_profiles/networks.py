"""What published networks compute and hold. A multiply-add is 2 FLOPs."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Network:
    """Cost of one inference of a network."""

    # FLOPs of one inference.
    flops: float
    # Number of its weights.
    weights: float
    # Whether most of it is attention: matrix products, not convolutions.
    attention: bool = False


def _network(million_multiply_adds: float, million_weights: float, *, attention: bool = False) -> Network:
    return Network(2e6 * million_multiply_adds, 1e6 * million_weights, attention)


STAGES: Final = ((3, 64, 256, 56), (4, 128, 512, 28), (6, 256, 1024, 14), (3, 512, 2048, 7))
"""Of ResNet-50: blocks, inner channels, outer channels, side of the stage's images (He et al., 2015, table 1)."""
FLOAT_BYTES: Final = 4


def resnet50_work() -> tuple[float, float]:
    """(FLOPs, bytes read and written) of ResNet-50 v1.5 at batch 1, 224 x 224, fp32, batch normalisation folded in.

    Counted as a ModelProfile counts: each operator reads its inputs and weights and writes its outputs.
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


def _bert_large_flops(tokens: int) -> float:
    """24 layers of width 1024 (Devlin et al., 2018): 12 products of width x width for each token, and two of the
    attention for each pair."""
    layers, width = 24, 1024
    return layers * (2.0 * 12 * width**2 * tokens + 4.0 * tokens**2 * width)


RESNET50: Final = Network(resnet50_work()[0], 25.6e6)
MLPERF: Final = {
    "resnet50": RESNET50,
    # torchvision, retinanet_resnet50_fpn: 151.54 billion multiply-adds, 34.0 million weights. MLPerf's has ResNeXt-50
    # in place of ResNet-50, which has 4 % more.
    "retinanet": _network(151_540, 34.0),
    # At 384 tokens, the longest of its queries, which decide the 90th percentile.
    "bert-99": Network(_bert_large_flops(384), 335e6, attention=True),
}
"""Networks of MLPerf Inference with one input per query of a size that is known."""

TORCHVISION: Final = {
    "convnext_base": _network(15_360, 88.6),
    "convnext_tiny": _network(4_460, 28.6),
    "densenet121": _network(2_830, 8.0),
    "efficientnet_b0": _network(390, 5.3),
    "efficientnet_b4": _network(4_390, 19.3),
    "efficientnet_v2_s": _network(8_370, 21.5),
    "googlenet": _network(1_500, 6.6),
    "inception_v3": _network(5_710, 27.2),
    "mnasnet05": _network(100, 2.2),
    "mobilenet_v2": _network(300, 3.5),
    "mobilenet_v3_large": _network(220, 5.5),
    "mobilenet_v3_small": _network(60, 2.5),
    "regnet": _network(3_180, 15.3),
    "regnet_y_800mf": _network(830, 6.4),
    "resnet18": _network(1_810, 11.7),
    "resnet50": _network(4_090, 25.6),
    "resnet101": _network(7_800, 44.5),
    "resnext50": _network(4_230, 25.0),
    "resnext101": _network(16_410, 88.8),
    "resnet_3d": _network(40_700, 33.4),
    "resnet_mixed": _network(43_340, 11.7),
    "resnet_2plus1d": _network(40_520, 31.5),
    "shufflenet_v2": _network(140, 2.3),
    "squeezenet1_1": _network(350, 1.2),
    "vit": _network(17_560, 86.6, attention=True),
    "wideresnet50": _network(11_400, 68.9),
}
"""As torchvision's documentation of its weights gives them (GFLOPS there are multiply-adds), by the names that Qualcomm
AI Hub Models has for them; `regnet` is regnet_x_3_2gf."""

_MOBILENET_V1: Final = {
    (1.0, 4.24): {224: 569, 192: 418, 160: 291, 128: 186},
    (0.75, 2.59): {224: 317, 192: 233, 160: 162, 128: 104},
    (0.5, 1.34): {224: 150, 192: 110, 160: 77, 128: 49},
    (0.25, 0.47): {224: 41, 192: 34, 160: 21, 128: 14},
}
_MOBILENET_V2: Final = {
    (1.4, 6.06): {224: 582},
    (1.3, 5.34): {224: 509},
    (1.0, 3.47): {224: 300, 192: 221, 160: 154, 128: 99, 96: 56},
    (0.75, 2.61): {224: 209, 192: 153, 160: 107, 128: 69, 96: 39},
    (0.5, 1.95): {224: 97, 192: 71, 160: 50, 128: 32, 96: 18},
    (0.35, 1.66): {224: 59, 192: 43, 160: 30, 128: 20, 96: 11},
}
_MOBILENET_V3: Final = {
    "large-minimalistic_224_1.0": _network(209, 3.9),
    "large_224_0.75": _network(155, 4.0),
    "large_224_1.0": _network(217, 5.4),
    "small-minimalistic_224_1.0": _network(65, 2.0),
    "small_224_0.75": _network(44, 2.4),
    "small_224_1.0": _network(66, 2.9),
}
_EFFICIENTNET_LITE: Final = (
    _network(407, 4.7),
    _network(631, 5.4),
    _network(899, 6.1),
    _network(1440, 8.2),
    _network(2640, 13.0),
)
"""All by their authors' tables: tensorflow/models, research/slim/nets/mobilenet_v1.md and mobilenet/README.md;
tensorflow/tpu, models/official/efficientnet/lite/README.md."""
_MOBILENET: Final = re.compile(r"mobilenet-v([12])-([0-9.]+)-(\d+)-(?:non-)?quantized")
_LITE: Final = re.compile(r"efficientnet-lite(\d)-(?:non-)?quantized")


def of_matrix(model: str) -> Network | None:
    """The network of a model's name in `edge_cloud_matrix`, without its precision; None if its cost is unknown."""
    if model == "resnet50":
        return RESNET50
    if found := _LITE.fullmatch(model):
        return _EFFICIENTNET_LITE[int(found[1])]
    if found := _MOBILENET.fullmatch(model):
        table = _MOBILENET_V1 if found[1] == "1" else _MOBILENET_V2
        for (width, weights), costs in table.items():
            if width == float(found[2]) and int(found[3]) in costs:
                return _network(costs[int(found[3])], weights)
    return _MOBILENET_V3.get(model.removeprefix("mobilenet-v3-").rpartition("_")[0])
