"""What is fuzzed: functions of bytes that refuse with a code or take what they are given, and raise nothing else."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from google.protobuf.message import DecodeError

from fuzz.http import Rest
from harness.oip import Tensor, infer_request
from shoal.agent.dataplane import request, tensors
from shoal.coordinator.core.fleet.checks import check_receipt
from shoal.policies import cross_check, load
from shoal.types.assignment import Status
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.link import Hello, Receipts
from shoal.types.receipt import Rates, Receipt, SignedReceipt
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.v1 import link_pb2
from shoal.wire import nouns, signing

EXAMPLES: Final = Path(__file__).parents[2] / "policies" / "examples"
OK: Final = "OK"
UNREADABLE: Final = "unreadable"
"""gRPC's own answer to bytes that are no message of the kind: the parser refuses them before our code runs."""


@dataclass(frozen=True, slots=True)
class Target:
    """run: how bytes were taken, by its code. seeds: sound inputs to start from. words: tokens of its language."""

    run: Callable[[bytes], str]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()


def _coded(take: Callable[[bytes], object]) -> Callable[[bytes], str]:
    def run(data: bytes) -> str:
        try:
            take(data)
        except ShoalError as error:
            return _told(error.refusal)
        except DecodeError:
            return UNREADABLE
        return OK

    return run


def _told(refusal: Refusal) -> str:
    assert isinstance(refusal.code, Code)
    assert refusal.remedy
    return refusal.code


def _from_agent(data: bytes) -> None:
    """What is taken is a noun that says the same when it is sent on."""
    noun = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(data))
    again: link_pb2.FromAgent = nouns.from_agent_to_wire(noun)
    assert repr(nouns.from_agent_from_wire(again)) == repr(noun), "numbers that are unknown are NaN, unlike themselves"
    if isinstance(noun, Receipts):
        for each in noun.receipts:
            refusal = check_receipt(each.receipt, NODE, NOW)
            rates = each.receipt.rates
            known = (*rates.matmul_flops.values(), rates.copy_bytes, rates.load_bytes, rates.launch_s)
            assert refusal is not None or all(math.isfinite(rate) and rate > 0 for rate in known)


def _to_agent(data: bytes) -> None:
    noun = nouns.to_agent_from_wire(link_pb2.ToAgent.FromString(data))
    assert repr(nouns.to_agent_from_wire(nouns.to_agent_to_wire(noun))) == repr(noun)


def _receipts(certificate: x509.Certificate) -> Callable[[bytes], None]:
    """Never signed by anybody: nothing passes, whatever is in it."""

    def take(data: bytes) -> None:
        signed = nouns.decode(SignedReceipt, data)
        signing.verify(certificate, signed.signature, "eu", "n1", "receipt", signed.content)
        raise AssertionError("a forged receipt was believed")

    return take


def _rest(data: bytes) -> None:
    """The first two bytes say how much of the rest is JSON, as a header does."""
    split = int.from_bytes(data[:2])
    message, _ = tensors.request_of("m", "", data[2:], None if split == 0xFFFF else split)
    request.read(message.SerializeToString())


def _yaml(data: bytes) -> str:
    """Problems are listed, each with its place, code and remedy; nothing is raised."""
    loaded = load([("fuzz.yaml", data)])
    problems = [*loaded.problems, *cross_check(loaded.documents, (), ())]
    for problem in problems:
        assert problem.line >= 1
    codes = [_told(problem.refusal) for problem in problems]
    return codes[0] if codes else OK


NOW: Final = Wall(1e9)


def _node() -> Node:
    cpu = Device(
        "cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "ort 1", "CPUExecutionProvider", Bytes(2**34), parallelism=4
    )
    return Node(
        "n1", "eu", Role.AGENT, {"site": "a"}, "0", "linux", "x86_64", Bytes(2**34), Bytes(2**34), (cpu,), "h:1", "h:2",
        "h:3", "h:4", "boot-1",
    )  # fmt: skip


NODE: Final = _node()


def _receipt() -> Receipt:
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
    said = (Hello(NODE, "nonce", None, 1, NOW), status, Receipts((nouns.signed(_receipt(), b"signature"),)))
    return [nouns.from_agent_to_wire(noun).SerializeToString() for noun in said]


def _infer_seeds() -> list[bytes]:
    one = infer_request("m", (Tensor("x", "FP32", (1, 4), bytes(16)), Tensor("s", "BYTES", (1,), b"\1\0\0\0a")), "id")
    one.parameters["sequence_id"].int64_param = 7
    one.parameters["timeout"].int64_param = 1000
    return [one.SerializeToString()]


def _rest_seeds() -> list[bytes]:
    plain = b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[0.5,-1]}]}'
    text = b'{"inputs":[{"name":"s","datatype":"BYTES","shape":[1],"data":["a"]}],"outputs":[{"name":"y"}]}'
    head = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[4],"parameters":{"binary_data_size":4}}]}'
    return [b"\xff\xff" + plain, b"\xff\xff" + text, len(head).to_bytes(2) + head + b"abcd"]


def _http_seeds() -> list[bytes]:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[0.5,-1]}]}'
    infer = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = b"POST /v2/models/m/versions/1/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    index = b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n" + b'{"ready":true}'
    ready = b"GET /v2/models/m/ready HTTP/1.1\r\nhost: x\r\nshoal-hop: 0\r\nauthorization: Bearer t\r\n\r\n"
    return [infer, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), index + ready, ready + infer]


def targets(certificate: x509.Certificate) -> Mapping[str, Target]:
    """certificate: of the node whose receipts are forged."""
    json_words: tuple[Any, ...] = (b'"inputs"', b'"shape"', b'"data"', b'"parameters"', b'"binary_data_size"', b"1e400")
    http_words = (b"content-length: ", b"transfer-encoding: chunked\r\n", b"content-encoding: gzip\r\n", b"%00", b"%2f",
                  b"expect: 100-continue\r\n", b"inference-header-content-length: ", b"\r\n ", b"HTTP/1.0",
                  b"HEAD ", b"connection: close\r\n", b"shoal-tenant: ", b"/v2/health/ready")  # fmt: skip
    yaml_words = (b"apiVersion: shoal/v1\n", b"kind: Policy\n", b"spec:\n", b"&a ", b"*a", b"<<: ", b"!!", b"---\n",
                  b"  require:\n", b"availability", b"where", b"node.name", b"objective", b"fallback")  # fmt: skip
    return {
        "link": Target(_coded(_from_agent), link_seeds),
        "to-agent": Target(_coded(_to_agent), lambda: [link_pb2.ToAgent().SerializeToString()]),
        "receipts": Target(_coded(_receipts(certificate)), lambda: [nouns.encode(nouns.signed(_receipt(), b"s"))]),
        "infer": Target(_coded(request.read), _infer_seeds),
        "rest": Target(_coded(_rest), _rest_seeds, json_words),
        "http": Target(Rest().take, _http_seeds, http_words),
        "yaml": Target(_yaml, lambda: [path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml"))], yaml_words),
    }
