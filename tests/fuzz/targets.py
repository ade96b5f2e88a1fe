"""What is fuzzed: functions of bytes that refuse with a code or take what they are given, and raise nothing else."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import DecodeError

from fuzz import http2
from fuzz.http import Rest
from harness.attacks.seeds import NODE, NOW, link_seeds, policy_seeds, receipt
from harness.builders.federation_members import advertisement, member
from harness.builders.negotiation import award, notice, offer, renewal, solicitation
from harness.clients.oip import Tensor, infer_request
from shoal.agent.dataplane import request, tensors
from shoal.agent.frames.format import (
    FrameError,
    FrameReader,
    FrameType,
    InferHeader,
    decode_infer,
    decode_json,
    encode_head,
    encode_infer,
    encode_json,
    read_refusal,
)
from shoal.coordinator.core.federation.rules import check_advertisement, check_solicitation
from shoal.coordinator.core.fleet.checks import check_receipt
from shoal.policies import cross_check, load
from shoal.types.agreement import (
    Award,
    Delivered,
    GatewayRef,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    ReportContent,
    ServiceReport,
    ServiceState,
)  # fmt: skip
from shoal.types.chain import LedgerEntry, first_break
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.link import Receipts
from shoal.types.offer import Advertisement, Decline, Member, Offer, Solicitation
from shoal.types.receipt import SignedReceipt
from shoal.types.units import Joules, Seconds
from shoal.v1 import federation_pb2, link_pb2
from shoal.wire import nouns, signed_envelope, signing

OK: Final = "OK"
FRAME_PAYLOAD: Final = 4096
"""Limit of a payload: below the largest input, so that both sides of it are reached."""
UNREADABLE: Final = "unreadable"
"""gRPC's own answer to bytes that are no message of the kind: the parser refuses them before our code runs."""


@dataclass(frozen=True, slots=True)
class Target:
    """run: how bytes were taken, by its code. seeds: sound inputs to start from. words: tokens of its language."""

    run: Callable[[bytes], str]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()


def _code_of_parse(take: Callable[[bytes], object]) -> Callable[[bytes], str]:
    def run(data: bytes) -> str:
        try:
            take(data)
        except ShoalError as error:
            return _checked_code(error.refusal)
        except DecodeError:
            return UNREADABLE
        return OK

    return run


def _checked_code(refusal: Refusal) -> str:
    assert isinstance(refusal.code, Code)
    assert refusal.remedy
    return refusal.code


def _from_agent(data: bytes) -> None:
    """What is taken is a noun that says the same when it is sent on."""
    noun = nouns.from_agent_from_wire(link_pb2.FromAgent.FromString(data))
    again: link_pb2.FromAgent = nouns.from_agent_to_wire(noun)
    assert repr(nouns.from_agent_from_wire(again)) == repr(noun), "numbers that are unknown are NaN, unlike themselves"
    reader = nouns.SessionReader()
    assert repr([reader.read(again), reader.read(again)]) == repr([noun, noun]), "what is repeated is the same"
    if isinstance(noun, Receipts):
        for each in noun.receipts:
            refusal = check_receipt(each.receipt, NODE, NOW)
            rates = each.receipt.rates
            divisors = (*rates.matmul_flops.values(), rates.copy_bytes, rates.load_bytes)
            absurd = rates.launch_s < 0 or math.isinf(rates.launch_s)
            assert refusal is not None or (all(map(_divides, divisors)) and not absurd)


def _divides(rate: float) -> bool:
    """NaN is a rate that was not measured."""
    return math.isnan(rate) or 0 < rate < math.inf


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


def _signed_envelope(certificate: x509.Certificate) -> Callable[[bytes], None]:
    """Never signed by anybody, by the coordinator of a region that is known: nothing passes."""
    root = certificate.public_bytes(serialization.Encoding.PEM).decode()

    def take(data: bytes) -> None:
        message = federation_pb2.Said.FromString(data)
        for kind in TRADED:
            if signed_envelope.kind_of(kind) == message.kind:
                signed_envelope.verify_envelope(message, kind, to=message.to, roots_of=lambda region: (root,), wall=NOW)
                raise AssertionError("what nobody signed was believed")
        raise refuse(Code.MESSAGE_INVALID, "another kind", "one that regions say", "update the sender")

    return take


def _negotiation_message(data: bytes) -> None:
    """What a region says, signed well: the first byte says of which kind. What counts is within reach."""
    kind: Any = TRADED[data[0] % len(TRADED)] if data else Advertisement
    noun = nouns.decode(kind, data[1:])
    assert repr(nouns.decode(kind, nouns.encode(noun))) == repr(noun)
    match noun:
        case Advertisement():
            if (refusal := check_advertisement(noun, None)) is not None:
                raise ShoalError(refusal)
            numbers = [number for each in noun.classes for number in (each.cost_usd_per_h, each.confidence)]
            assert all(math.isfinite(number) and number >= 0 for number in (*numbers, *noun.rtt_s.values()))
        case Solicitation():
            if (refusal := check_solicitation(noun)) is not None:
                raise ShoalError(refusal)
        case ReportContent():
            first_break(noun.entries)


def _frames(data: bytes) -> str:
    """Whatever a peer sends is frames, or ends its connection. The first byte says how much arrives at once."""
    reader, at, taken = FrameReader(), 1, 0
    try:
        while at < len(data):
            buffer = reader.buffer()
            count = min(len(buffer), 1 + 40 * data[0], len(data) - at)
            assert count > 0
            buffer[:count] = data[at : at + count]
            reader.on_received(count)
            at += count
            while (frame := reader.next_frame(FRAME_PAYLOAD)) is not None:
                taken += 1
                assert len(frame.payload) <= FRAME_PAYLOAD
                match frame.frame_type:
                    case FrameType.INFER:
                        decode_infer(frame.header)
                    case FrameType.REFUSAL:
                        read_refusal(frame.header)
                    case _ if frame.header:
                        decode_json(frame.header)
    except FrameError:
        return UNREADABLE
    return OK if taken else UNREADABLE


def _rest(data: bytes) -> None:
    """The first two bytes say how much of the rest is JSON, as a header does."""
    split = int.from_bytes(data[:2])
    length = None if split == 0xFFFF else split
    message, _ = tensors.run_steps(tensors.convert_request("m", "", bytearray(data[2:]), length))
    request.parse_request(message)


def _yaml(data: bytes) -> str:
    """Problems are listed, each with its place, code and remedy; nothing is raised."""
    loaded = load([("fuzz.yaml", data)])
    problems = [*loaded.problems, *cross_check(loaded.documents, (), ())]
    for problem in problems:
        assert problem.line >= 1
    codes = [_checked_code(problem.refusal) for problem in problems]
    return codes[0] if codes else OK


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


def _frame_seeds() -> list[bytes]:
    infer = encode_infer(InferHeader("a-1", "acme", "", 1.5))
    refusal = encode_json({"code": "OVERLOADED", "found": "f", "asked": "a", "remedy": "r"})
    sent = (
        encode_head(FrameType.HELLO, 0, encode_json({"nonce": "n"}), 0)
        + encode_head(FrameType.INFER, 1, infer, 5) + b"12345"
        + encode_head(FrameType.CALL, 2, encode_json({"kind": "ping"}), 0)
        + encode_head(FrameType.CANCEL, 1, b"{}", 0)
    )  # fmt: skip
    told = encode_head(FrameType.REFUSAL, 1, refusal, 0) + encode_head(FrameType.ANSWER, 2, b"", 3) + b"abc"
    return [b"\xff" + sent, b"\x00" + sent, b"\xff" + told]


def _http_seeds() -> list[bytes]:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[0.5,-1]}]}'
    infer = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = b"POST /v2/models/m/versions/1/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    index = b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n" + b'{"ready":true}'
    ready = b"GET /v2/models/m/ready HTTP/1.1\r\nhost: x\r\nshoal-hop: 0\r\nauthorization: Bearer t\r\n\r\n"
    values = b'{"id":"i","x":[0.5,-1],"parameters":{"s":"a","top_k":5}}'
    generate = b"POST /v2/models/m/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(values), values)
    return [
        infer,
        chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        index + ready,
        ready + infer,
        generate,
        generate.replace(b"generate", b"generate_stream") + ready,
        generate.replace(b"generate", b"generate_stream").replace(b"HTTP/1.1", b"HTTP/1.0"),
        infer.replace(b"content-length", b"expect: 100-continue\r\ncontent-length")[:-1],
    ]


TRADED: Final = (
    Advertisement, Solicitation, Offer, Decline, Award, Grant, Release, Renewal, Renewed, Notice, ReportContent, Member,
)  # fmt: skip


def _trade_seeds() -> list[bytes]:
    """One of each kind that a region may say."""
    refusal = Refusal(Code.TRADE_DENIED, "f", "a", "r")
    entry = LedgerEntry(1, NOW, "granted", "a", "us", "t/w", "", "", "", "")
    gateways = (GatewayRef("gw", "gw:1"),)
    service = ServiceReport(1, 0, Seconds(0.1), Joules(1.0), EnergySource.MEASURED, 0.1)
    sound = (
        advertisement(rtt_s={"us": 0.1}, heads={"us": "a" * 64}),
        solicitation(),
        offer(),
        Decline("s-1", 1, "eu", refusal),
        award(),
        Grant("g-1", "b-1", "eu", Seconds(30.0), gateways),
        Release("s-1", "b-1", "us"),
        renewal(1, "nonce"),
        Renewed("g-1", "nonce", Seconds(30.0), ServiceState.READY, service, gateways, ""),
        notice(1.0),
        ReportContent((Delivered("eu", "g-1", Seconds(0.1), Seconds(0.2), 10, False),), (entry,)),
        member(),
    )
    assert tuple(type(each) for each in sound) == TRADED
    return [bytes([number]) + nouns.encode(each) for number, each in enumerate(sound)]


def _signed_envelope_seeds(certificate: x509.Certificate) -> list[bytes]:
    der = certificate.public_bytes(serialization.Encoding.DER)
    return [
        federation_pb2.Said(
            by="eu", to="us", kind=signed_envelope.kind_of(kind), content=seed[1:], signature=b"s" * 70, certificate=der
        ).SerializeToString()
        for kind, seed in zip(TRADED, _trade_seeds(), strict=True)
    ]


def targets(certificate: x509.Certificate) -> Mapping[str, Target]:
    """certificate: of the node whose receipts are forged."""
    json_words: tuple[Any, ...] = (b'"inputs"', b'"shape"', b'"data"', b'"parameters"', b'"binary_data_size"', b"1e400")
    http_words = (b"content-length: ", b"transfer-encoding: chunked\r\n", b"content-encoding: gzip\r\n", b"%00", b"%2f",
                  b"expect: 100-continue\r\n", b"inference-header-content-length: ", b"\r\n ", b"HTTP/1.0",
                  b"HEAD ", b"connection: close\r\n", b"shoal-tenant: ", b"/v2/health/ready")  # fmt: skip
    yaml_words = (b"apiVersion: shoal/v1\n", b"kind: Policy\n", b"spec:\n", b"&a ", b"*a", b"<<: ", b"!!", b"---\n",
                  b"  require:\n", b"availability", b"where", b"node.name", b"objective", b"fallback")  # fmt: skip
    return {
        "link": Target(_code_of_parse(_from_agent), link_seeds),
        "to-agent": Target(_code_of_parse(_to_agent), lambda: [link_pb2.ToAgent().SerializeToString()]),
        "receipts": Target(
            _code_of_parse(_receipts(certificate)), lambda: [nouns.encode(nouns.make_signed_receipt(receipt(), b"s"))]
        ),
        "federation": Target(
            _code_of_parse(_signed_envelope(certificate)), lambda: _signed_envelope_seeds(certificate)
        ),
        "trade": Target(_code_of_parse(_negotiation_message), _trade_seeds),
        "infer": Target(_code_of_parse(request.parse_request), _infer_seeds),
        "rest": Target(_code_of_parse(_rest), _rest_seeds, json_words),
        "frames": Target(_frames, _frame_seeds),
        "http2": Target(http2.take, http2.seeds),
        "http": Target(Rest().take, _http_seeds, http_words),
        "yaml": Target(_yaml, policy_seeds, yaml_words),
    }
