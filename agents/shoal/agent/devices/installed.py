"""Device drivers by entry point (group `shoal.devices`), including third-party ones."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

CPU_DRIVER: Final = "cpu"


def installed_drivers(*, cpu: bool) -> Mapping[str, str]:
    """Name -> `module:class`, in the order of names. `cpu` False leaves out the CPU's."""
    found = {each.name: each.value for each in entry_points(group="shoal.devices") if cpu or each.name != CPU_DRIVER}
    return dict(sorted(found.items()))
