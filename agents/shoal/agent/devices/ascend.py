"""Huawei's Ascend NPUs through `npu-smi`, for ONNX Runtime's CANN provider. From documents: not run on such hardware.

The provider comes with a build of ONNX Runtime (`onnxruntime-cann`); with another one a load is refused, and says so.

Sources: Huawei, npu-smi command reference (`info -l`, `info -t board | usages | common -i ID`), whose output is lines
`name : value` in blocks, one for each chip of a card, with the chip's number in its block; ONNX Runtime,
docs/execution-providers/community-maintained/CANN (`device_id`); CANN, environment variables
(`ASCEND_RT_VISIBLE_DEVICES`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from shoal.agent.devices.machine import LiveMachine, Machine, label, number
from shoal.agent.devices.runtime import runtime_version
from shoal.agent.devices.topology import host_links, numa_node, pci_folder
from shoal.agent.driver_port import DeviceAccess, DriverClock, DriverOptions
from shoal.types.codes import Code, refuse
from shoal.types.device import Device, DeviceKind, Reading
from shoal.types.units import Bytes, Seconds, Watts

PROVIDER: Final = "CANNExecutionProvider"
_MOST_CARDS: Final = 64
_FILES: Final = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
"""What every process on an NPU opens, besides the NPU's own file."""

_Block = Mapping[str, str]


class AscendDriver:
    """`machine` answers in the place of this one, in tests and in recordings."""

    def __init__(self, clock: DriverClock, options: DriverOptions, machine: Machine | None = None) -> None:
        self._clock = clock
        self._machine = machine or LiveMachine()
        # (card, chip) by the device's name.
        self._chips: dict[str, tuple[str, str]] = {}

    def discover(self) -> tuple[Device, ...]:
        """One device for each chip that has memory, numbered as the runtime numbers them: in the order of cards and
        chips."""
        devices: list[Device] = []
        listed = (block.get("NPU ID", "") for block in _blocks(self._machine.run("npu-smi", "info", "-l")))
        cards = list(dict.fromkeys(card for card in listed if number(card) is not None))[:_MOST_CARDS]
        for card in cards:
            board = _merged(self._info("board", card))
            for block in self._info("usages", card):
                chip, memory = block.get("Chip ID", ""), _memory(block)
                if number(chip) is None or memory is None:
                    continue
                name = f"ascend{len(devices)}"
                self._chips[name] = card, chip
                folder = pci_folder(board.get("PCIe Bus Info", "").lower())
                devices.append(
                    replace(
                        _device(name, board, memory[0]),
                        numa=numa_node(self._machine, folder),
                        links=host_links(self._machine, folder),
                    )
                )
        return tuple(devices)

    def read(self, device: str) -> Reading:
        card, chip = self._chips.get(device, ("", ""))
        usage = self._of_chip("usages", card, chip) if card else {}
        memory = _memory(usage)
        if memory is None:
            raise refuse(
                Code.DEVICE_LOST, f"npu-smi does not answer for {device!r:.80}", "a device", "run npu-smi info"
            )
        common = self._of_chip("common", card, chip)
        total, free = memory
        return Reading(
            device=device,
            free_bytes=Bytes(min(total, free)),
            utilisation=_share(usage.get("Aicore Usage Rate(%)", "")),
            temperature_c=_figure(common.get("Temperature(C)", "")),
            power_w=Watts(_figure(common.get("NPU Real-time Power(W)", ""))),
            energy_j=math.nan,
            taken_at=self._clock.wall(),
        )

    def access(self, device: str) -> DeviceAccess:
        if device not in self._chips:
            return DeviceAccess()
        index = device.removeprefix("ascend")
        # The only one that the process sees, so its number 0.
        return DeviceAccess(
            {"ASCEND_RT_VISIBLE_DEVICES": index}, (f"/dev/davinci{index}", *_FILES), options={"": {"device_id": "0"}}
        )

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        return Seconds(0.0)

    def _info(self, kind: str, card: str) -> list[_Block]:
        return _blocks(self._machine.run("npu-smi", "info", "-t", kind, "-i", card))

    def _of_chip(self, kind: str, card: str, chip: str) -> _Block:
        """What it says of the chip. A card's controller measures for a card with one chip."""
        blocks = self._info(kind, card)
        own = [block for block in blocks if block.get("Chip ID") == chip]
        chips = {block["Chip ID"] for block in blocks if "Chip ID" in block}
        shared = [block for block in blocks if "Chip ID" not in block] if len(chips) == 1 else []
        return _merged([*shared, *own])


def _device(name: str, board: _Block, memory: int) -> Device:
    facts = {
        "pci": board.get("PCIe Bus Info", ""),
        "firmware": board.get("Firmware Version", ""),
        "sleep": "no: npu-smi takes no such order",
    }
    return Device(
        name=name,
        kind=DeviceKind.NPU,
        vendor="Huawei",
        model=label(board.get("Product Name") or board.get("Chip Name") or "Ascend"),
        driver="npu-smi",
        driver_version=label(board.get("Software Version", "")) or "unknown",
        runtime_version=runtime_version(),
        provider=PROVIDER,
        memory_bytes=Bytes(memory),
        attributes={fact: label(value) for fact, value in facts.items() if value},
    )


def _blocks(output: str) -> list[_Block]:
    """Blocks of `name : value` lines, between empty ones."""
    blocks: list[dict[str, str]] = [{}]
    for line in output.splitlines():
        name, colon, value = line.partition(":")
        if not line.strip():
            blocks.append({})
        elif colon:
            blocks[-1][name.strip()] = value.strip()
    return [block for block in blocks if block]


def _merged(blocks: list[_Block]) -> _Block:
    return {name: value for block in blocks for name, value in block.items()}


def _memory(block: _Block) -> tuple[int, int] | None:
    """(all, free) bytes of the memory that the chip has: HBM, or DDR on the smaller ones. None if it has none, or does
    not say how much is in use."""
    for kind in ("HBM", "DDR"):
        total, used = number(block.get(f"{kind} Capacity(MB)", "")), _share(block.get(f"{kind} Usage Rate(%)", ""))
        if total is not None and 0 < total < 2**30 and not math.isnan(used):
            return total * 2**20, int(total * (1 - used)) * 2**20
    return None


def _share(percent: str) -> float:
    value = _figure(percent) / 100
    return value if value <= 1 else math.nan


def _figure(text: str) -> float:
    """A number of 0 or more; NaN for `NA` and anything else."""
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan
    return value if 0 <= value < 1e6 else math.nan
