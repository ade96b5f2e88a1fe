"""Entry point of the program that finds what is installed: `python -m shoal.agent.devices.find_installation`."""

import sys
from importlib.metadata import version

from shoal.agent.devices.installation import DriverSearch, Installation
from shoal.agent.devices.installed import present_drivers
from shoal.agent.packing import pack, unpack


def main() -> None:
    order = sys.stdin.buffer.read()
    if not order:
        return  # the agent ended before it asked
    search = unpack(DriverSearch, order)
    found = Installation(version("shoal-orchestrator-agent"), present_drivers(search.options, cpu=search.cpu))
    sys.stdout.buffer.write(pack(found))


if __name__ == "__main__":
    main()
