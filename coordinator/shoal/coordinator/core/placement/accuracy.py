"""By what a replica's answers are judged: before it serves, where its node makes another model of the pushed one or its
device computes in another precision, and in batches."""

from typing import Final

from shoal.types.assignment import Batching, Comparison, Preparation
from shoal.types.device import Device
from shoal.types.migration import Against
from shoal.types.tolerance import with_defaults
from shoal.types.workload import Intent

PUSHED: Final = "fp32"
"""The precision of which others are made (`policies.resolve`)."""


def preparation_of(intent: Intent, precision: str) -> Preparation:
    """What a node does to a model in fp32, to run it in that precision."""
    return Preparation(with_defaults(intent.migration.tolerances, PUSHED, precision))


def comparison_of(intent: Intent, device: Device, precision: str) -> Comparison | None:
    """How the answers of a model of that precision are compared when the device has loaded it. None where it computes
    in that precision, and where the policy compares nothing."""
    rule, arithmetic = intent.migration, device.arithmetic(precision)
    if arithmetic == precision or rule.against is Against.NONE:
        return None
    return Comparison(with_defaults(rule.tolerances, precision, arithmetic), rule.samples, rule.advisory)


def batching_of(intent: Intent, device: Device, precision: str) -> Batching | None:
    """How a replica may run requests in batches; None: each runs alone."""
    if intent.max_batch == 1 or intent.session:
        return None
    tolerances = with_defaults(intent.migration.tolerances, precision, device.arithmetic(precision))
    bound_s = intent.require.latency_p95_s
    return Batching(intent.max_batch, intent.batch_delay_s, bound_s, tolerances, intent.batch_padding)
