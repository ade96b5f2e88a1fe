"""A typed client of one region's API: what the command line calls, and scripts may.

    with Region(Contexts().get()) as region:
        for node in region.get("nodes").nodes:
            print(node.node.name, node.liveness)

Every method raises ShoalError with the code that the coordinator gave.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc

from shoal.client.contexts import Context
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.v1 import artifacts_pb2, artifacts_pb2_grpc, nouns_pb2, operator_pb2, operator_pb2_grpc
from shoal.wire.handshake import check_own, check_peer
from shoal.wire.identity import dns_of
from shoal.wire.limits import CHUNK_BYTES, LINK_BYTES, channel_options
from shoal.wire.status import refusal_of

TIMEOUT_S: Final = 30.0
PUSH_TIMEOUT_S: Final = 600.0

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


class Region:
    """One connection; closed on exit."""

    def __init__(self, context: Context) -> None:
        self.context = context
        try:
            credentials = grpc.ssl_channel_credentials(
                context.ca.read_bytes(), context.key.read_bytes(), context.certificate.read_bytes()
            )
        except OSError as cause:
            raise refuse(
                Code.UNAUTHENTICATED,
                f"{cause.filename}: {cause.strerror}",
                "the context's files",
                "shoal context login",
            ) from cause
        self._server = dns_of(context.region, Role.COORDINATOR, "coordinator")
        self._credentials = credentials
        first, *others = context.address.split(",")
        self._dial(first)
        if others:
            self._find((first, *others))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def _dial(self, address: str) -> None:
        self.address = address
        options = channel_options(LINK_BYTES, server_name=self._server)
        self._channel = grpc.secure_channel(address, self._credentials, options)
        self._operator = operator_pb2_grpc.OperatorStub(self._channel)
        self._artifacts = artifacts_pb2_grpc.ArtifactsStub(self._channel)

    def _find(self, addresses: Sequence[str]) -> None:
        """The one of several coordinators that leads; where none can be asked, the first one's calls say why."""
        for address in addresses:
            self._redial(address)
            try:
                leader = self.who_am_i().leader
            except ShoalError:
                continue
            if leader in addresses:
                self._redial(leader)
            return
        self._redial(addresses[0])

    def _redial(self, address: str) -> None:
        if address != self.address:
            self._channel.close()
            self._dial(address)

    def who_am_i(self) -> operator_pb2.WhoAmIReply:
        return self._call(self._operator.WhoAmI, operator_pb2.WhoAmIRequest())  # type: ignore[no-any-return]

    def plan(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str] | None = None
    ) -> operator_pb2.PlanReply:
        request = operator_pb2.PlanRequest(documents=documents, digests=digests or {}, only_drift=not documents)
        return self._call(self._operator.Plan, request)  # type: ignore[no-any-return]

    def apply(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str] | None = None, plan_hash: str = ""
    ) -> operator_pb2.ApplyReply:
        request = operator_pb2.ApplyRequest(documents=documents, digests=digests or {}, plan_hash=plan_hash)
        return self._call(self._operator.Apply, request)  # type: ignore[no-any-return]

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        request = operator_pb2.GetRequest(kind=kind, name=name, tenant=tenant)
        return self._call(self._operator.Get, request)  # type: ignore[no-any-return]

    def delete(self, kind: str, name: str, tenant: str = "") -> None:
        self._call(self._operator.Delete, operator_pb2.DeleteRequest(kind=kind, name=name, tenant=tenant))

    def explain(self, tenant: str, name: str) -> operator_pb2.ExplainReply:
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=name)
        return self._call(self._operator.Explain, operator_pb2.ExplainRequest(workload=key))  # type: ignore[no-any-return]

    def cordon(self, node: str, *, cordoned: bool) -> operator_pb2.NodeView:
        request = operator_pb2.CordonRequest(node=node, cordoned=cordoned)
        return self._call(self._operator.Cordon, request).node  # type: ignore[no-any-return]

    def events(self, after: int = 0, *, follow: bool = False, limit: int = 0) -> Iterator[operator_pb2.Event]:
        request = operator_pb2.EventsRequest(after=after, follow=follow, limit=limit)
        try:
            yield from self._operator.Events(request, timeout=None if follow else TIMEOUT_S)
        except grpc.RpcError as cause:
            raise self._refused(cause) from cause

    def create_token(self, role: str, name: str = "", valid_s: float = 3600.0) -> operator_pb2.CreateTokenReply:
        request = operator_pb2.CreateTokenRequest(role=role, name=name, valid_s=valid_s)
        return self._call(self._operator.CreateToken, request)  # type: ignore[no-any-return]

    def doctor(self) -> operator_pb2.DoctorReply:
        return self._call(self._operator.Doctor, operator_pb2.DoctorRequest())  # type: ignore[no-any-return]

    def revoke(self, name: str, *, role: str = "", reason: str) -> tuple[str, ...]:
        """The serials of the certificates that are refused from now on. role: empty for the node of that name."""
        request = operator_pb2.RevokeRequest(name=name, role=role, reason=reason)
        return tuple(self._call(self._operator.Revoke, request).serials)

    def settle(self, node: str, *, keep: str = "running") -> operator_pb2.NodeView:
        request = operator_pb2.SettleRequest(node=node, keep=keep)
        return self._call(self._operator.Settle, request).node  # type: ignore[no-any-return]

    def release(self, node: str) -> operator_pb2.NodeView:
        request = operator_pb2.ReleaseNodeRequest(node=node)
        return self._call(self._operator.Release, request).node  # type: ignore[no-any-return]

    def authority(self) -> operator_pb2.GetAuthorityReply:
        request = operator_pb2.GetAuthorityRequest()
        return self._call(self._operator.GetAuthority, request)  # type: ignore[no-any-return]

    def rotate(self, stage: str = "") -> operator_pb2.GetAuthorityReply:
        request = operator_pb2.RotateAuthorityRequest(stage=stage)
        return self._call(self._operator.RotateAuthority, request).authority  # type: ignore[no-any-return]

    def set_signal(self, name: str, value: str) -> operator_pb2.SignalView:
        """`price` or `carbon` by an operator's word, with its unit; an empty value clears it."""
        request = operator_pb2.SetSignalRequest(name=name, value=value)
        return self._call(self._operator.SetSignal, request).signal  # type: ignore[no-any-return]

    def join_federation(self, address: str, token: str) -> operator_pb2.FederationView:
        """address: where the federation redeems tokens."""
        request = operator_pb2.JoinFederationRequest(address=address, token=token)
        return self._call(self._operator.JoinFederation, request).federation  # type: ignore[no-any-return]

    def leave_federation(self, *, forget: bool = False) -> None:
        self._call(self._operator.LeaveFederation, operator_pb2.LeaveFederationRequest(forget=forget))

    def federation(self) -> operator_pb2.FederationView | None:
        """None where the region is in none."""
        reply = self._call(self._operator.GetFederation, operator_pb2.GetFederationRequest())
        return reply.federation if reply.HasField("federation") else None

    def models(self, name: str = "") -> tuple[artifacts_pb2.Model, ...]:
        request = artifacts_pb2.ListModelsRequest(name=name)
        return tuple(self._call(self._artifacts.List, request).models)

    def push(
        self, path: Path, name: str = "", progress: Progress | None = None, *, signature: bytes = b""
    ) -> artifacts_pb2.PushReply:
        """Sends one .onnx file, and an OpenSSF model signature over it where there is one. The coordinator verifies and
        inspects before it is stored."""
        return self._send(self._artifacts.Push, path, name, progress, signature)

    def inspect(self, path: Path, progress: Progress | None = None) -> artifacts_pb2.PushReply:
        """As `push`, and nothing is stored."""
        return self._send(self._artifacts.Inspect, path, "", progress, b"")

    def remove_model(self, name: str) -> artifacts_pb2.RemoveModelReply:
        request = artifacts_pb2.RemoveModelRequest(name=name)
        return self._call(self._artifacts.Remove, request)  # type: ignore[no-any-return]

    def clear_model(self, model: str, allow_version: int = 0) -> operator_pb2.ClearModelReply:
        """Forgets that a model is poisoned; with a version, lets that older signed one back instead."""
        request = operator_pb2.ClearModelRequest(model=model, allow_version=allow_version)
        return self._call(self._operator.ClearModel, request)  # type: ignore[no-any-return]

    def _send(
        self, method: Callable[..., Any], path: Path, name: str, progress: Progress | None, signature: bytes
    ) -> artifacts_pb2.PushReply:
        digest, size = digest_of(path)

        def chunks() -> Iterable[artifacts_pb2.PushChunk]:
            head = artifacts_pb2.PushHead(name=name, size=size, digest=digest, signature=signature)
            yield artifacts_pb2.PushChunk(head=head)
            done = 0
            with path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    yield artifacts_pb2.PushChunk(data=data)
                    done += len(data)
                    if progress is not None:
                        progress(done, size)

        return self._call(method, chunks(), timeout=PUSH_TIMEOUT_S)  # type: ignore[no-any-return]

    def _call(self, method: Callable[..., Any], request: Any, timeout: float = TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout)
        except grpc.RpcError as cause:
            raise self._refused(cause) from cause

    def _refused(self, cause: grpc.RpcError) -> ShoalError:
        """What the coordinator said; where grpc says only `unavailable`, what a handshake apart from it says."""
        refusal = refusal_of(cause)
        if refusal.code is not Code.COORDINATOR_UNREACHABLE:
            return ShoalError(refusal)
        try:
            check_own(self.context, Wall(time.time()))  # noqa: TID251 - a command's own clock
            check_peer(self.context, self.address, self._server)
        except ShoalError as error:
            return error
        except (OSError, ValueError):
            pass  # nobody there: as grpc said
        return refuse(
            refusal.code,
            f"{self.address}: {refusal.found}",
            "the region's coordinator",
            "check that it runs (shoal dev status) and that the context's address is right",
        )


def digest_of(path: Path) -> tuple[str, int]:
    """(`sha256:<hex>`, bytes) of a file. Raises ShoalError(SOURCE_UNREACHABLE)."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return f"sha256:{digest}", file.tell()
    except OSError as cause:
        raise refuse(
            Code.SOURCE_UNREACHABLE, f"{path}: {cause.strerror}", "a model file that can be read", "correct the path"
        ) from cause
