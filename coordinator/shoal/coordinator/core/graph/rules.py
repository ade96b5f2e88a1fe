"""What a model from outside may be: limits on its size and shape, and the operators it may name."""

from dataclasses import dataclass
from typing import Final

from shoal.types.units import Bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """Every limit has a value that real models stay far below and a machine survives.

    max_size_bytes: of the file; protobuf itself ends below 2 GiB. max_depth: nested messages; a subgraph takes three.
    max_fields: protobuf fields in the whole file, a packed array being one. max_nodes: of all graphs and functions, and
    again with every call to a function written out. max_subgraph_depth: If in Loop in If .. max_call_depth: functions
    that call functions, their subgraphs counted. max_activation_bytes: of one run at the reference shapes. domains:
    operator sets that are known; a model may bring others as functions of its own. trusted: digests of models whose
    custom operators the operator of this region has allowed.
    """

    max_size_bytes: Bytes = Bytes(2**31 - 1)
    max_depth: int = 64
    max_fields: int = 4_000_000
    max_nodes: int = 100_000
    max_subgraph_depth: int = 16
    max_call_depth: int = 64
    max_activation_bytes: Bytes = Bytes(256 * 2**30)
    domains: frozenset[str] = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
    trusted: frozenset[str] = frozenset()


RULES: Final = Rules()
