"""Names within the region of this folder (conftest.py)."""

from typing import Final

NAME: Final = "steady"
"""Its one workload, which is served all the time."""
NODES: Final = ("gateway", "plain-cpu")
