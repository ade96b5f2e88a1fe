"""What a model from outside may contain: limits on its size and shape, and the operators it may use."""

from dataclasses import dataclass
from typing import Final

from shoal.types.units import Bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits on a model. Every default is far above what real models need, and low enough that a machine survives
    it."""

    # Size of the file; protobuf itself ends below 2 GiB.
    max_size_bytes: Bytes = Bytes(2**31 - 1)
    # Nested protobuf messages; a subgraph takes three.
    max_depth: int = 64
    # Protobuf fields in the whole file; a packed array counts as one.
    max_fields: int = 4_000_000
    # Nodes of all graphs and functions. The limit applies again with every function call expanded.
    max_nodes: int = 100_000
    # Nested subgraphs, such as an If in a Loop in an If.
    max_subgraph_depth: int = 16
    # Functions that call functions, their subgraphs included.
    max_call_depth: int = 64
    # Activation memory of one run at the reference shapes.
    max_activation_bytes: Bytes = Bytes(256 * 2**30)
    # Operator domains that are known. A model may define others as its own functions.
    domains: frozenset[str] = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
    # Digests of models whose custom operators the region's operator has allowed.
    trusted_digests: frozenset[str] = frozenset()


RULES: Final = Rules()
