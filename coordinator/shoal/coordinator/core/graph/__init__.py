"""An ONNX graph's operators, FLOPs, bytes, activations, inputs and outputs, and whether the model is admitted at
all."""

from shoal.coordinator.core.graph.profile import profile_of
from shoal.coordinator.core.graph.rules import RULES, Rules

__all__ = ["RULES", "Rules", "profile_of"]
