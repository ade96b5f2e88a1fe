"""Which clocks of this folder's region (conftest.py) are wrong, and by how much."""

from typing import Final

PAIR: Final = ("plain-cpu", "edge-npu")
"""The nodes of workload `pair`. The clock of the first is behind, that of the second ahead, from the first start on."""
SKEW_S: Final = 600
"""What F27 asks for: 10 minutes."""
