"""Valid inputs that fuzzers start from: an agent's messages to its coordinator, and policy documents."""

from pathlib import Path
from typing import Final

from shoal.types.assignment import Status
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.link import Hello, Receipts
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.wire import nouns

NOW: Final = Wall(1e9)
_EXAMPLES: Final = Path(__file__).parents[3] / "policies" / "examples"


def _node() -> Node:
    cpu = Device(
        "cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "ort 1", "CPUExecutionProvider", Bytes(2**34), parallelism=4
    )
    return Node(
        "n1", "eu", Role.AGENT, {"site": "a"}, "0", "linux", "x86_64", Bytes(2**34), Bytes(2**34), (cpu,),
        "h:1", "h:4", "boot-1",
    )  # fmt: skip


NODE: Final = _node()


def receipt() -> Receipt:
    rates = Rates(
        {"fp32": 1e10}, {"fp32": 1e10}, 1e10, 1e10, Seconds(1e-5), Seconds(1e-6), 1e9, Watts(5.0), Watts(20.0),
        EnergySource.ESTIMATED,
    )  # fmt: skip
    return Receipt(
        "n1", "cpu0", "CPUExecutionProvider", "1", "ort 1", ("fp32",), (), rates, Bytes(2**33), 0.1, NOW,
        Seconds(1.0), False, "probe",
    )  # fmt: skip


def link_seeds() -> list[bytes]:
    """A hello, a status and a receipt, as an agent sends them."""
    reading = Reading("cpu0", Bytes(2**33), 0.1, 50.0, Watts(10.0), 1.0, NOW)
    status = Status("n1", 1, 1, True, None, (), (), (reading,), (), NOW, True)
    messages = (
        Hello(NODE, "nonce", None, 1, NOW),
        status,
        Receipts((nouns.make_signed_receipt(receipt(), b"signature"),)),
    )
    return [nouns.from_agent_to_wire(noun).SerializeToString() for noun in messages]


def policy_seeds() -> list[bytes]:
    """The examples of the policy language."""
    return [path.read_bytes() for path in sorted(_EXAMPLES.glob("*.yaml"))]
