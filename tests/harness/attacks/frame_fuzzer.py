"""Sends fuzzed frames from its own process: what an attacker with a valid certificate can send to a region.

`python -m harness.attacks.frame_fuzzer KIND ADDRESS COUNT CERTIFICATE KEY AUTHORITY` prints, like
`harness.attacks.attacker`, one JSON line when it has begun and one at the end, with a count of each answer. An answer
is one of our codes, a status that gRPC itself gives to bytes that are no message (`grpc STATUS`), `taken`, or `silence`
where no answer is due.
"""

import asyncio
import json
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiomqtt
import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError

from harness.attacks.seeds import NODE, NOW, link_seeds, policy_seeds
from harness.clients.oip import RestClient, Tensor, infer_request, read_response
from harness.crypto.pki import CertificateFiles
from harness.servers.mosquitto import tls
from shoal.types import topics
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import Hello
from shoal.types.topics import UP, Channel
from shoal.v1 import link_pb2, mqtt_pb2, operator_pb2
from shoal.wire import nouns
from shoal.wire.certificates import identity_of_pem
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options
from shoal.wire.seal import SigningIdentity, sign

SEED: Final = 13
ANSWERED_WITHIN_S: Final = 15.0
"""For every frame: a longer wait counts as unbounded."""
SESSION_FRAMES: Final = 20
"""Frames in a session; the last is the last bad one that the coordinator tolerates."""
TAKEN: Final = "taken"
SILENCE: Final = "silence"
CLOSED: Final = "closed"
_MODEL: Final = "relu"

Rng = np.random.Generator


def mutate(data: bytes, rng: Rng) -> bytes:
    """Flip, cut, duplicate or insert bytes; the result may still be valid."""
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(found) + 1))
        match int(rng.integers(4)):
            case 0:
                found[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 1:
                del found[at : at + int(rng.integers(1, 9))]
            case 2:
                found[at : at + 4] = b"\xff" * 4
            case _:
                found[at:at] = found[max(0, at - 20) : at]
    return bytes(found)


@dataclass
class Fuzzer:
    """Sends mutated frames to one server and counts the answers."""

    # host:port of the server.
    address: str
    # Frames to send.
    count: int
    # Client certificate that the fuzzer presents.
    files: CertificateFiles
    # Seeded, so that a run repeats.
    rng: Rng = field(default_factory=lambda: np.random.default_rng(SEED))
    # How often each answer came.
    answers: Counter[str] = field(default_factory=Counter)
    # Frames still to send.
    remaining: int = 0

    def __post_init__(self) -> None:
        self.remaining = self.count

    @property
    def identity(self) -> Identity:
        return identity_of_pem(self.files.certificate.read_bytes())

    def pick(self, seeds: Sequence[bytes]) -> bytes:
        return mutate(seeds[int(self.rng.integers(len(seeds)))], self.rng)

    def channel(self, server: str) -> grpc.aio.Channel:
        certificate, key, authority = self.files.read()
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.aio.secure_channel(self.address, credentials, channel_options(LINK_BYTES, server_name=server))

    def at_coordinator(self) -> grpc.aio.Channel:
        return self.channel(dns_of(self.identity.region, Role.COORDINATOR, "coordinator"))

    def hello(self) -> Hello:
        identity = self.identity
        node = replace(NODE, name=identity.name, region=identity.region)
        return Hello(node, f"nonce-{self.remaining}", None, 1, NOW)

    async def run_all(self, one: Callable[[], Awaitable[int]], at_once: int) -> None:
        """one: sends some frames, counts their answers, returns the number of frames."""

        async def worker() -> None:
            while self.remaining > 0:
                self.remaining -= 1
                async with asyncio.timeout(ANSWERED_WITHIN_S):
                    sent = await one()
                self.remaining -= sent - 1

        await asyncio.gather(*(worker() for _ in range(at_once)))


async def link(fuzzer: Fuzzer) -> None:
    """Sessions, every other one of which begins with a valid hello."""
    await _sessions(fuzzer, lambda: fuzzer.pick(link_seeds()))


async def receipts(fuzzer: Fuzzer) -> None:
    """Valid messages with receipts that are unsigned, or whose signature belongs to other bytes."""
    sound = link_seeds()[-1]

    def forge() -> bytes:
        made = link_pb2.FromAgent.FromString(sound)
        for each in made.receipts.receipts:
            each.content = mutate(each.content, fuzzer.rng)
            each.signature = fuzzer.rng.bytes(int(fuzzer.rng.integers(80)))
        return made.SerializeToString()

    await _sessions(fuzzer, forge, hello_always=True)


async def _sessions(fuzzer: Fuzzer, frame: Callable[[], bytes], *, hello_always: bool = False) -> None:
    async with fuzzer.at_coordinator() as channel:
        open_session = channel.stream_stream("/shoal.v1.AgentLink/Session", None, None)

        def frames() -> list[bytes]:
            """What one session takes: one frame instead of a hello; or as many as it forgives, and at last one that is
            no message."""
            if not hello_always and fuzzer.remaining % 2:
                return [frame()]
            found = [nouns.from_agent_to_wire(fuzzer.hello()).SerializeToString()]
            while len(found) < SESSION_FRAMES:
                found.append(frame())
                if not _readable(found[-1]):
                    break
            return found

        async def one() -> int:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = open_session(None, wait_for_ready=True)
            sent = frames()
            told = 0
            try:
                for each in sent:
                    await call.write(each)
                await call.done_writing()
                async for answer in call:
                    said = link_pb2.ToAgent.FromString(answer)
                    if said.HasField("refused"):
                        fuzzer.answers[said.refused.refusal.code] += 1
                        told += 1
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                fuzzer.answers[_code(await call.trailing_metadata())] += 1
                told += 1
            fuzzer.answers[SILENCE] += max(0, len(sent) - told)
            return len(sent)

        await fuzzer.run_all(one, 1)


def _readable(frame: bytes) -> bool:
    try:
        link_pb2.FromAgent.FromString(frame)
    except DecodeError:
        return False
    return True


async def infer(fuzzer: Fuzzer) -> None:
    seeds = [infer_request(_MODEL, (Tensor("x", "FP32", (1, 4), bytes(16)),), "id").SerializeToString()]
    async with fuzzer.channel("localhost") as channel:
        await _unary(fuzzer, channel, "/inference.GRPCInferenceService/ModelInfer", lambda: fuzzer.pick(seeds))


async def yaml(fuzzer: Fuzzer) -> None:
    """Documents that are applied with a hash that no plan has: valid ones are stale."""
    seeds = policy_seeds()

    def request() -> bytes:
        text = fuzzer.pick(seeds).decode(errors="replace")
        asked = operator_pb2.ApplyRequest(
            documents=[operator_pb2.Document(name="fuzz.yaml", text=text)], plan_hash="0" * 64
        )
        # every tenth: not even the message is one
        return asked.SerializeToString() if fuzzer.remaining % 10 else mutate(asked.SerializeToString(), fuzzer.rng)

    def answer_code(answer: bytes) -> str:
        reply = operator_pb2.ApplyReply.FromString(answer)
        return reply.problems[0].refusal.code if reply.problems else "PLAN_STALE" if reply.stale else TAKEN

    async with fuzzer.at_coordinator() as channel:
        await _unary(fuzzer, channel, "/shoal.v1.Operator/Apply", request, answer_code)


async def _unary(
    fuzzer: Fuzzer,
    channel: grpc.aio.Channel,
    method: str,
    request: Callable[[], bytes],
    answer_code: Callable[[bytes], str] = lambda answer: TAKEN,
) -> None:
    call = channel.unary_unary(method, None, None)

    async def one() -> int:
        try:
            fuzzer.answers[answer_code(await call(request(), wait_for_ready=True))] += 1
        except grpc.aio.AioRpcError as error:
            fuzzer.answers[_code(error.trailing_metadata(), f"grpc {error.code().name}")] += 1
        return 1

    await fuzzer.run_all(one, 8)


async def rest(fuzzer: Fuzzer) -> None:
    """Heads and bodies, several per connection; a connection that the server closes is opened again."""
    body = b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[0.5,-1,2,3]}]}'
    client = RestClient(int(fuzzer.address.rpartition(":")[2]), fuzzer.files.authority.read_bytes(), fuzzer.files)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one() -> int:
        draw = fuzzer.rng.random()
        sent = client.request_bytes(
            "POST", f"/v2/models/{_MODEL}/infer", mutate(body, fuzzer.rng) if draw < 0.8 else body
        )
        if draw > 0.7:
            sent = mutate(sent, fuzzer.rng)
        reader, writer = idle.pop() if idle else await client.connect()
        try:
            writer.write(sent)
            if draw > 0.7:
                writer.write_eof() if writer.can_write_eof() else writer.write(b"\r\n\r\n" * 40)
            # half a request may wait for its rest: then it is hung up on
            async with asyncio.timeout(1.0 if draw > 0.7 else None):
                answer = await read_response(reader)
            fuzzer.answers[answer.headers.get("shoal-code") or (TAKEN if answer.status == 200 else CLOSED)] += 1
            if draw <= 0.7 and answer.headers.get("connection") != "close":
                idle.append((reader, writer))
                return 1
        except TimeoutError:
            fuzzer.answers[SILENCE] += 1
        except (OSError, EOFError):
            fuzzer.answers[CLOSED] += 1
        writer.transport.abort()
        return 1

    await fuzzer.run_all(one, 8)


async def mqtt(fuzzer: Fuzzer) -> None:
    """Envelopes on all topics that a node may write, with bytes changed before or after signing."""
    identity = fuzzer.identity
    signature = SigningIdentity.from_pem(fuzzer.files.key.read_bytes(), fuzzer.files.certificate.read_bytes())
    opening = mqtt_pb2.Opening(hello=nouns.to_wire(fuzzer.hello()), key=bytes(32), presence="p", beat=1)
    sealed = mqtt_pb2.Presence(nonce="n", online=True).SerializeToString()
    seeds = [opening.SerializeToString(), sealed, *link_seeds()]
    signed = {
        channel: sign(signature, identity.region, identity.name, channel, opening.SerializeToString()) for channel in UP
    }

    def payload(channel: Channel) -> bytes:
        if fuzzer.remaining % 4:
            return mutate(signed[channel], fuzzer.rng)
        return sign(signature, identity.region, identity.name, channel, fuzzer.pick(seeds))

    host, _, port = fuzzer.address.rpartition(":")
    async with aiomqtt.Client(
        host, int(port), identifier=f"{identity.name}-fuzz", tls_context=tls(fuzzer.files),
        protocol=aiomqtt.ProtocolVersion.V5, max_inflight_messages=200,
    ) as client:  # fmt: skip
        client.pending_calls_threshold = 1000

        async def one() -> int:
            channel = UP[int(fuzzer.rng.integers(len(UP)))]
            await client.publish(topics.of_node(identity.region, identity.name, channel), payload(channel), qos=1)
            fuzzer.answers[SILENCE] += 1
            return 1

        await fuzzer.run_all(one, 8)


KINDS: Final[dict[str, Callable[[Fuzzer], Awaitable[None]]]] = {
    "link": link,
    "receipts": receipts,
    "infer": infer,
    "yaml": yaml,
    "rest": rest,
    "mqtt": mqtt,
}


def _code(trailing: Any, otherwise: str = CLOSED) -> str:
    """The code in a call's trailing metadata."""
    told = {key: value for key, value in trailing or () if isinstance(value, str)}
    return told.get("shoal-code", otherwise)


async def _main(kind: str, address: str, count: int, files: CertificateFiles) -> None:
    fuzzer = Fuzzer(address, count, files)
    print(json.dumps({"event": "attacking"}), flush=True)
    await KINDS[kind](fuzzer)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}
    print(json.dumps({"sent": fuzzer.answers.total(), "answers": dict(fuzzer.answers), **cost}), flush=True)


if __name__ == "__main__":
    _kind, _address, _count, *_files = sys.argv[1:]
    _certificate, _key, _authority = (Path(path) for path in _files)
    asyncio.run(_main(_kind, _address, int(_count), CertificateFiles(_certificate, _key, _authority)))
