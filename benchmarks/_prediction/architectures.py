"""What the names of NAS-Bench-201 and FBNet architectures tell: features, operations and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from shoal.coordinator.core.prediction.transfer.known import Floats

_CELL_OPERATORS: Final = ("none", "skip_connect", "avg_pool_3x3", "nor_conv_1x1", "nor_conv_3x3")
_CELL_STAGES: Final = ((16, 32), (32, 16), (64, 8))
"""Channels and side of the feature maps of NAS-Bench-201's three stages (Dong, Yang, 2020)."""
_CELLS_OF_A_STAGE: Final = 5
_FBNET_LAYERS: Final = ((16, 1, 1), (24, 4, 2), (32, 4, 2), (64, 4, 2), (112, 4, 1), (184, 4, 2), (352, 1, 1))
"""Channels, layers and stride of FBNet's stages, after a stem of 16 channels with side 112 (Wu et al., 2019)."""
_FBNET_CHANNELS, _FBNET_SIDE = 16, 112
_BYTES: Final = 4


@dataclass(frozen=True)
class Work:
    """Of each architecture, without what all of them share."""

    # (models,)
    flops: Floats
    # (models,): of activations and weights, in fp32.
    bytes: Floats


def nasbench_features(archs: Sequence[str]) -> Floats:
    """(models, features): of each edge its operator, whether it is used, and how many are used of each operator.

    A runtime may leave out what the output does not need, or what only zeros reach.
    """
    rows = []
    for arch in archs:
        edges = _cell(arch)
        reached, needed = {0}, {3}
        for node in (1, 2, 3):
            if any(edges[source, node] != "none" and source in reached for source in range(node)):
                reached.add(node)
        for node in (2, 1, 0):
            if any(edges[node, target] != "none" and target in needed for target in range(node + 1, 4)):
                needed.add(node)
        operators = np.array([[name == each for each in _CELL_OPERATORS] for name in edges.values()], float)
        wanted = np.array([[target in needed] for _, target in edges], float)
        fed = np.array([[source in reached] for source, _ in edges], float)
        kinds = (operators, operators * wanted, operators * wanted * fed)
        edge_features = [kind.ravel() for kind in kinds]
        rows.append(np.concatenate([*edge_features, *(kind.sum(0) for kind in kinds), [float(3 in reached)]]))
    return np.array(rows)


def nasbench_work(archs: Sequence[str]) -> Work:
    flops, moved = np.zeros((2, len(archs)))
    for number, arch in enumerate(archs):
        for name in _cell(arch).values():
            kernel = {"nor_conv_1x1": 1, "nor_conv_3x3": 9}.get(name, 0)
            for channels, side in _CELL_STAGES:
                flops[number] += _CELLS_OF_A_STAGE * 2 * kernel * channels**2 * side**2
                used = name != "none"
                weights = kernel * channels**2
                moved[number] += _CELLS_OF_A_STAGE * _BYTES * used * (2 * channels * side**2 + weights)
    return Work(flops, moved)


def fbnet_features(archs: Sequence[str]) -> Floats:
    """(models, features): which block each of the 22 layers is."""
    blocks = sorted({block for arch in archs for block in arch.split()})
    return np.array([[float(block == each) for block in arch.split() for each in blocks] for arch in archs])


def fbnet_work(archs: Sequence[str]) -> Work:
    layers, side = [], _FBNET_SIDE
    for channels, count, stride in _FBNET_LAYERS:
        for number in range(count):
            side //= stride if number == 0 else 1
            layers.append((channels, side, stride if number == 0 else 1))
    inputs = [_FBNET_CHANNELS, *(channels for channels, *_ in layers)]
    flops, moved = np.zeros((2, len(archs)))
    for number, arch in enumerate(archs):
        for block, (taken, given), (_, out, stride) in zip(arch.split(), pairwise(inputs), layers, strict=True):
            if block == "skip":
                continue
            kernel, expansion, *grouped = block.split("_")
            groups, wide = 2 if grouped else 1, taken * int(expansion[1:])
            into = (out * stride) ** 2
            weights = taken * wide / groups + int(kernel[1:]) ** 2 * wide + wide * given / groups
            each = taken * wide / groups * into + (int(kernel[1:]) ** 2 * wide + wide * given / groups) * out**2
            flops[number] += 2 * each
            moved[number] += _BYTES * (weights + taken * into + 2 * wide * (into + out**2) + given * out**2)
    return Work(flops, moved)


def _cell(arch: str) -> dict[tuple[int, int], str]:
    """The operator of each edge, by the numbers of its nodes."""
    edges = {}
    for target, node in enumerate(arch.split("+"), 1):
        for part in node.strip("|").split("|"):
            name, _, source = part.partition("~")
            edges[int(source), target] = name
    return dict(sorted(edges.items()))
