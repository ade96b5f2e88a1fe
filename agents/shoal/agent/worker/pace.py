"""Pacing of emulated devices: run times predicted from the profile, and turns between the workers of one device."""

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.agent.driver_port import EmulatedPace
from shoal.types.assignment import Work
from shoal.types.codes import Code, refuse


def device_seconds(pace: EmulatedPace, work: Work, precision: str, scale: float = 1.0) -> float:
    """Seconds of device time for one inference, before `time_scale`.

    `scale` is the ratio of the elements of the request's inputs to those of the reference shapes; FLOPs and bytes grow
    with it. Roofline model (Williams et al., 2009) with the launch costs of `ports.EmulatedPace`. Raises
    ShoalError(LOAD_FAILED) without work.
    """
    if not work.nodes:
        raise refuse(
            Code.LOAD_FAILED,
            "the assignment does not say its model's work",
            f"FLOPs and bytes, to pace the emulated {pace.profile}",
            "update the coordinator",
        )
    rates = pace.rates
    compute = _compute_s(work.conv_flops, rates.conv_flops, precision) + _compute_s(
        work.matmul_flops + work.other_flops, rates.matmul_flops, precision
    )
    memory = work.bytes / rates.elementwise_bytes if rates.elementwise_bytes > 0 else 0.0
    return rates.launch_s + work.nodes * rates.node_s + max(compute, memory) * scale


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


def _compute_s(flops: float, rates: Mapping[str, float], precision: str) -> float:
    rate = rates.get(precision) or rates.get("fp32") or max(rates.values(), default=math.nan)
    return flops / rate if flops else 0.0
