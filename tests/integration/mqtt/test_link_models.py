"""Models by digest over HTTPS: resumed, judged request by request, and never a byte to who may not have them."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import pytest

from harness.builders.agent_values import assignment, verification
from harness.cluster.links import CLOCK, NODE, OTHER, REGION, identity_files
from harness.crypto.pki import Authority
from harness.fakes.meter import RecordedMeter
from harness.fakes.region import DIGEST, KnownModels
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.https import HttpsModels
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import RULES
from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.clock import SystemIds
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.migration import Against, Recording
from shoal.types.units import Bytes, Seconds
from shoal.wire.identity import check_validity, require

MODEL = bytes(range(256)) * 8192


class WholeModel(KnownModels):
    """As KnownModels, with bytes of which each has its place."""

    async def stat(self, digest: str) -> Bytes | None:
        return Bytes(len(MODEL)) if digest in self.kept else None

    async def read(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        for start in range(offset, len(MODEL), 100_000):
            yield MODEL[start : min(start + 100_000, len(MODEL))]


@dataclass
class Served:
    folder: Path
    authority: Authority
    server: ModelServer
    port: int
    revoked: set[str]

    def models(self, role: Role = Role.AGENT, name: str = NODE, valid_s: float = 3600.0) -> HttpsModels:
        issued = self.authority.issue(role, name, valid_s=valid_s)
        files = identity_files(self.folder / issued.certificate.stem, issued)
        return HttpsModels(files, lambda: f"127.0.0.1:{self.port}", CLOCK)


@pytest.fixture
async def served_models(tmp_path: Path) -> AsyncIterator[Served]:
    authority = Authority(tmp_path / "ca", REGION, CLOCK.wall())
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    models, meter, revoked = WholeModel(), RecordedMeter(), set[str]()
    links = GrpcLinks(meter)
    region = RegionalCoordinator(store, links, models, models, CLOCK, SystemIds(), RegionConfig(REGION))
    await region.start()
    models.kept.add(DIGEST)
    await region.models.push("ocr", Bytes(len(MODEL)), DIGEST, models.read(DIGEST, 0), actor="test")
    region.workloads.desired[NODE] = DesiredSet(NODE, Version("h", 1, 1), (), (), (DIGEST,), (), Seconds(1.0))

    def admit(method: str, caller: Identity) -> None:
        if (found := check_validity(caller, CLOCK.wall())) is not None:
            raise ShoalError(found)
        require(caller, region=REGION, roles=RULES[method])
        if caller.serial in revoked:
            raise refuse(Code.CERT_REVOKED, "it was revoked")

    files = identity_files(tmp_path / "server", authority.issue(Role.COORDINATOR, "coordinator"))
    server = ModelServer(region, files, admit, AuditTrail(region.events, meter), meter)
    yield Served(tmp_path, authority, server, await server.start("127.0.0.1", 0), revoked)
    await server.stop()


async def fetch_bytes(models: HttpsModels, offset: int = 0, digest: str = DIGEST) -> bytes:
    return b"".join([chunk async for chunk in models.fetch(digest, offset)])


async def refusal(models: HttpsModels, digest: str = DIGEST, offset: int = 0) -> Refusal:
    with pytest.raises(ShoalError) as caught:
        await fetch_bytes(models, offset, digest)
    return caught.value.refusal


async def test_the_whole_model_and_what_is_left_of_it(served_models: Served) -> None:
    models = served_models.models()
    assert await fetch_bytes(models) == MODEL
    for offset in (1, 100_000, len(MODEL) - 1):
        assert await fetch_bytes(models, offset) == MODEL[offset:]
    assert await fetch_bytes(served_models.models(Role.OPERATOR, "admin"), 5) == MODEL[5:]


async def test_a_node_gets_what_it_was_asked_to_keep_and_nothing_else(served_models: Served) -> None:
    unknown = await refusal(served_models.models(), "sha256:" + "b" * 64)
    foreign = await refusal(served_models.models(name=OTHER))
    assert unknown.code is foreign.code is Code.MODEL_UNKNOWN
    for digest in ("..", "%2e%2e%2fkey.pem", "sha256:" + "A" * 64, "x" * 4000):
        assert (await refusal(served_models.models(), digest)).code in (Code.MODEL_UNKNOWN, Code.FETCH_FAILED)


async def test_offsets_that_are_none(served_models: Served) -> None:
    assert "offset" in (await refusal(served_models.models(), offset=len(MODEL) + 1)).found


async def test_a01_a02_a03_a09_who_may_not_call(served_models: Served) -> None:
    assert (await refusal(served_models.models(Role.TENANT, "shop"))).code is Code.ROLE_DENIED
    assert "CERT_EXPIRED" in str(await refusal(served_models.models(valid_s=-60.0)))
    models = served_models.models(name="edge-9")
    other = Authority(served_models.folder / "other", REGION, CLOCK.wall()).issue(Role.AGENT, NODE)
    stranger = identity_files(served_models.folder / "stranger", other)
    (stranger.folder / "ca.pem").write_bytes(served_models.authority.certificate.read_bytes())
    address = f"127.0.0.1:{served_models.port}"
    assert (await refusal(HttpsModels(stranger, lambda: address, CLOCK))).code in (
        Code.CERT_UNTRUSTED,
        Code.FETCH_FAILED,
    )
    assert (await refusal(models)).code is Code.MODEL_UNKNOWN


async def test_a09_a_revoked_node(served_models: Served) -> None:
    issued = served_models.authority.issue(Role.AGENT, NODE)
    files = identity_files(served_models.folder / "mine", issued)
    models = HttpsModels(files, lambda: f"127.0.0.1:{served_models.port}", CLOCK)
    assert await fetch_bytes(models, len(MODEL) - 3) == MODEL[-3:]
    served_models.revoked.add(files.identity().serial)
    assert "CERT_REVOKED" in str(await refusal(models))


async def test_a10_no_certificate_and_no_tls(served_models: Served) -> None:
    secured = ssl.create_default_context(cafile=str(served_models.authority.certificate))
    for context in (None, secured):
        assert b"HTTP" not in await answer_to_a_stranger(served_models.port, context)


async def answer_to_a_stranger(port: int, context: ssl.SSLContext | None) -> bytes:
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        writer.write(b"GET /v1/models/x HTTP/1.1\r\nHost: x\r\n\r\n")
        return await reader.read(100)
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def test_what_a_node_was_asked_to_record_is_kept_and_nothing_else(served_models: Served) -> None:
    content = b"inputs and answers"
    digest = "sha256:" + sha256(content).hexdigest()
    models, catalog = served_models.models(), served_models.server._region.workloads
    with pytest.raises(ShoalError) as caught:
        await models.record("a-1", DIGEST, digest, content)
    assert caught.value.code is Code.ROLE_DENIED
    asked = verification("r-1", against=Against.REFERENCE, recording=Recording.HERE)
    one = replace(assignment("a-1"), model=DIGEST, verification=asked)
    catalog.desired[NODE] = replace(catalog.desired[NODE], assignments=(one,))
    for other in (served_models.models(name=OTHER), served_models.models(Role.OPERATOR, NODE)):
        with pytest.raises(ShoalError) as caught:
            await other.record("a-1", DIGEST, digest, content)
        assert caught.value.code is Code.ROLE_DENIED
    await models.record("a-1", DIGEST, digest, content)
    assert catalog.catalog.references[DIGEST, ""].pack.digest == digest


async def test_a_server_that_is_gone(served_models: Served) -> None:
    models = served_models.models()
    await served_models.server.stop()
    assert (await refusal(models)).code is Code.FETCH_FAILED


async def test_an_impostor_of_the_region_is_not_its_coordinator(served_models: Served, tmp_path: Path) -> None:
    region = served_models.server._region
    files = identity_files(tmp_path / "impostor", served_models.authority.issue(Role.AGENT, "edge-9"))
    impostor = ModelServer(
        region, files, lambda method, caller: None, AuditTrail(region.events, RecordedMeter()), RecordedMeter()
    )
    port = await impostor.start("127.0.0.1", 0)
    issued = CredentialFiles(identity_files(tmp_path / "me", served_models.authority.issue(Role.AGENT, NODE)).folder)
    assert (await refusal(HttpsModels(issued, lambda: f"127.0.0.1:{port}", CLOCK))).code is Code.CERT_UNTRUSTED
    await impostor.stop()
