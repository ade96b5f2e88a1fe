"""Pacing of emulated devices: run times by published figures, and turns between the workers of one device."""

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from shoal.agent.driver_port import EmulatedPace
from shoal.agent.emulation import PublishedFigure, nearest, seconds_of
from shoal.types.assignment import Work
from shoal.types.codes import Code, refuse
from shoal.types.units import Bytes, Seconds, Watts, show_number, show_seconds

_BYTES: Final = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""Bytes of a weight by precision."""


@dataclass(frozen=True, slots=True)
class ModelPace:
    """How one model runs on an emulated device."""

    # The published figure that it runs by: of the model itself, or of its nearest relative.
    relative: PublishedFigure
    # FLOPs of one inference at the reference shapes.
    flops: float
    # As in EmulatedPace.
    launch_s: Seconds
    # Watts of a run. NaN: nobody says.
    watts: Watts

    @property
    def note(self) -> str:
        """For people."""
        published = self.relative
        gflop = show_number(published.flops / 1e9)
        return f"paced as {published.model}, published: {show_seconds(published.latency_s)}, {gflop} GFLOP"

    def seconds(self, scale: float = 1.0) -> float:
        """Device time of one inference, before `time_scale`. `scale` is the ratio of the elements of its inputs to
        those of the reference shapes; FLOPs grow with it."""
        return seconds_of(self.relative, self.launch_s, self.flops * scale)


def model_pace(pace: EmulatedPace, work: Work, weights: float, precision: str) -> ModelPace:
    """weights: number of the model's weights. Raises ShoalError(LOAD_FAILED) without work."""
    if not work.nodes:
        raise refuse(
            Code.LOAD_FAILED,
            "the assignment does not say its model's work",
            f"FLOPs and bytes, to pace the emulated {pace.profile}",
            "update the coordinator",
        )
    # The published counts are of convolutions and matrix products alone.
    flops = work.conv_flops + work.matmul_flops or work.other_flops
    relative = nearest(pace.figures, flops, weights, precision, attention=work.matmul_flops > work.conv_flops)
    watts = pace.active_w if math.isnan(relative.joules) else Watts(relative.joules / relative.latency_s)
    return ModelPace(relative, flops, pace.launch_s, watts)


def weights_of(size: Bytes, precision: str) -> float:
    """Number of weights of a model of `size`, which is nearly all weights."""
    return size / _BYTES.get(precision, _BYTES["fp32"])


def element_count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


@contextmanager
def hold_slot(slots: tuple[str, ...]) -> Iterator[None]:
    """Hold one of the device's slots: files locked between processes. The kernel frees the lock of a dead holder."""
    if not slots:
        yield
        return
    handles = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in slots]
    try:
        for handle in handles:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        else:
            fcntl.flock(handles[os.getpid() % len(handles)], fcntl.LOCK_EX)
        yield
    finally:
        for handle in handles:
            os.close(handle)
