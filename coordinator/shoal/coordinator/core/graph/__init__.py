"""An ONNX graph's operators, FLOPs, bytes, activations, inputs and outputs; and whether it may come in at all."""

from shoal.coordinator.core.graph.profile import profile_of
from shoal.coordinator.core.graph.rules import RULES, Rules

__all__ = ["RULES", "Rules", "profile_of"]
