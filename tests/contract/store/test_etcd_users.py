"""Item 28: one etcd under several owners. Each region, by the user that its certificate names, reads and writes its own
keys and no other's; nobody but a member joins the cluster. Against Debian's etcd, made so by `etcd-users`."""

import asyncio
import http.client
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from harness.crypto.pki import CertificateFiles
from harness.servers.etcd import Etcd, etcd
from shoal.coordinator.main.options import parser_of, scopes_of
from shoal.coordinator.ports import Transaction
from shoal.coordinator.store.etcd.members import EtcdMember, EtcdMembers, at_revision, end_of
from shoal.coordinator.store.etcd.options import EtcdOptions
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.coordinator.store.etcd.users import authorise
from shoal.etcd import etcd_pb2
from shoal.types.codes import Code, ShoalError
from shoal.wire.identity import store_user_of

EU, NEAR, FEDERATION = "region/eu", "region/eu-2", "federation/eu"
"""Names that begin alike, and one that is another's in another role."""
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd"), scopes=(EU, NEAR, FEDERATION)) as found:
        yield found


@asynccontextmanager
async def store_of(cluster: Etcd, directory: Path, scope: str, user: str = "") -> AsyncIterator[EtcdStore]:
    """As a coordinator opens it. user: the scope whose user it comes as, if not its own."""
    opened = await EtcdStore.from_options(cluster.options(directory, scope, cluster.files_of(user or scope)))
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def member_as(cluster: Etcd, files: CertificateFiles) -> AsyncIterator[EtcdMember]:
    members = EtcdMembers.from_options(EtcdOptions.parse(cluster.options(Path(), "any", files)))
    try:
        yield members.current
    finally:
        await members.close()


def txn(*, compare: bytes = b"", put: bytes = b"", read: bytes = b"", delete: bytes = b"") -> etcd_pb2.TxnRequest:
    request = etcd_pb2.TxnRequest(compare=[at_revision(compare, 0)] if compare else [])
    if put:
        request.success.append(etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=put, value=b"spoilt")))
    if read:  # where the condition does not hold: a right is asked for in any case
        request.failure.append(etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=read)))
    if delete:
        gone = etcd_pb2.DeleteRangeRequest(key=delete, range_end=end_of(delete))
        request.success.append(etcd_pb2.RequestOp(request_delete_range=gone))
    return request


OWN = b"shoal/region/eu/"
ABROAD: list[Callable[[bytes], etcd_pb2.TxnRequest | etcd_pb2.RangeRequest]] = [
    lambda prefix: etcd_pb2.RangeRequest(key=prefix + b"data/nodes/a"),
    lambda prefix: etcd_pb2.RangeRequest(key=prefix, range_end=end_of(prefix)),
    lambda prefix: etcd_pb2.RangeRequest(key=OWN, range_end=max(end_of(prefix), end_of(OWN) + b"z")),
    lambda prefix: txn(put=prefix + b"data/nodes/a"),
    lambda prefix: txn(put=prefix + b"guard/x/0"),
    lambda prefix: txn(put=prefix + b"leader"),
    lambda prefix: txn(delete=prefix),
    lambda prefix: txn(compare=prefix + b"data/nodes/a"),
    lambda prefix: txn(put=OWN + b"data/x", read=prefix + b"data/nodes/a"),
]


@pytest.mark.parametrize("prefix", [b"shoal/region/eu-2/", b"shoal/federation/eu/", b"shoal/region/nobody/", b"other/"])
@pytest.mark.parametrize("number", range(len(ABROAD)))
async def test_a_region_reads_and_writes_nothing_of_another_one(cluster: Etcd, number: int, prefix: bytes) -> None:
    """Key by key, as a range, as a condition, in the branch of a transaction that is not taken."""
    request = ABROAD[number](prefix)
    async with member_as(cluster, cluster.files_of(EU)) as member:
        ask = member.kv.Range if isinstance(request, etcd_pb2.RangeRequest) else member.kv.Txn
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(request, timeout=LIMIT_S)  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await member.kv.Txn(txn(put=OWN + b"data/x", read=OWN + b"data/y", compare=OWN + b"leader"), timeout=LIMIT_S)


async def test_stores_of_several_owners_are_whole_beside_each_other(cluster: Etcd, tmp_path: Path) -> None:
    async with (
        store_of(cluster, tmp_path / "eu", EU) as one,
        store_of(cluster, tmp_path / "near", NEAR) as other,
        store_of(cluster, tmp_path / "federation", FEDERATION) as federation,
    ):
        for number, store in enumerate((one, other, federation)):
            await store.commit(Transaction({"nodes/a": b"%d" % number}))
        for number, store in enumerate((one, other, federation)):
            found = await store.read("nodes/a")
            assert found is not None
            assert found.value == b"%d" % number


async def test_a_region_watches_nothing_of_another_one(cluster: Etcd, tmp_path: Path) -> None:
    async with store_of(cluster, tmp_path, NEAR) as near, member_as(cluster, cluster.files_of(EU)) as member:
        for key, end in ((b"shoal/region/eu-2/", b"shoal/region/eu-20"), (b"shoal/", b"shoal0"), (b"\0", b"\0")):
            call = member.watch.Watch(None)
            create = etcd_pb2.WatchCreateRequest(key=key, range_end=end, start_revision=1)
            await call.write(etcd_pb2.WatchRequest(create_request=create))
            await near.commit(Transaction({"secret": b"1"}))
            answer = await asyncio.wait_for(call.read(), LIMIT_S)
            assert isinstance(answer, etcd_pb2.WatchResponse)
            assert (answer.canceled, list(answer.events)) == (True, [])
            assert "permission denied" in answer.cancel_reason
            call.cancel()


async def test_a_region_elects_its_leader_and_cannot_unseat_another_one_s(cluster: Etcd, tmp_path: Path) -> None:
    async with store_of(cluster, tmp_path / "a", NEAR) as near, store_of(cluster, tmp_path / "b", NEAR) as second:
        leads = near.election(b"first")
        await asyncio.wait_for(leads.campaign(), LIMIT_S)
        waits = asyncio.ensure_future(second.election(b"second").campaign())
        async with member_as(cluster, cluster.files_of(EU)) as member:
            revoke = etcd_pb2.LeaseRevokeRequest(ID=leads._lease)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await member.lease.LeaseRevoke(revoke, timeout=LIMIT_S)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await second.election(b"second").leader() == b"first"
        assert not waits.done()
        await leads.resign()
        await asyncio.wait_for(waits, LIMIT_S)


async def test_a_region_changes_no_users(cluster: Etcd) -> None:
    async with member_as(cluster, cluster.files_of(EU)) as member:
        grant = etcd_pb2.AuthUserGrantRoleRequest(user="region-eu", role="root")
        for asked in (
            member.auth.UserAdd(etcd_pb2.AuthUserAddRequest(name="mine"), timeout=LIMIT_S),
            member.auth.UserGrantRole(grant, timeout=LIMIT_S),
            member.auth.RoleGet(etcd_pb2.AuthRoleGetRequest(role="region-eu-2"), timeout=LIMIT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_region_copies_nothing_of_the_whole(cluster: Etcd) -> None:
    """A snapshot holds every key."""
    async with member_as(cluster, cluster.files_of(EU)) as member:
        snapshot = member.channel.unary_stream("/etcdserverpb.Maintenance/Snapshot", None, None)(b"", timeout=LIMIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await snapshot.read()
        assert "permission denied" in str(refused.value.details())


async def test_a_certificate_of_nobody_and_that_of_the_members_open_nothing(cluster: Etcd) -> None:
    async with member_as(cluster, cluster._server) as member:
        for request in (etcd_pb2.RangeRequest(key=OWN), etcd_pb2.RangeRequest(key=b"\0", range_end=b"\0")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await member.kv.Range(request, timeout=LIMIT_S)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_coordinator_without_the_right_to_its_prefix_is_told_so_at_its_start(
    cluster: Etcd, tmp_path: Path
) -> None:
    """At once, and not after 20 s as of an etcd that does not answer."""
    with pytest.raises(ShoalError) as refused:
        async with asyncio.timeout(LIMIT_S), store_of(cluster, tmp_path, NEAR, EU):
            pass
    assert refused.value.code is Code.STORE_DENIED
    assert "'region-eu'" in refused.value.refusal.found
    assert refused.value.refusal.asked == "one that may read and write shoal/region/eu-2/"
    assert "etcd-users" in refused.value.refusal.remedy


def test_the_program_says_so_and_ends(cluster: Etcd, tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("shoal-coordinator"))
    anywhere = [each for use in ("link", "enrol", "metrics", "models", "peers") for each in (f"--{use}", "127.0.0.1:0")]
    flags = [*anywhere, "--store", "etcd", *cluster.flags_as(cluster.files_of(EU))]
    done = subprocess.run(
        [program, "run", "--region", "eu-2", "--data-dir", str(tmp_path), *flags],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert "found: etcd refuses its user 'region-eu'" in done.stderr
    assert "wanted: one that may read and write shoal/region/eu-2/" in done.stderr
    assert done.stderr.rstrip().endswith("(STORE_DENIED)")


async def test_a_certificate_that_takes_the_place_of_one_without_the_right_is_taken_up(
    cluster: Etcd, tmp_path: Path
) -> None:
    """In the files of a coordinator that runs: its user was another one."""
    files = CertificateFiles(tmp_path / "cert.pem", tmp_path / "key.pem", cluster.files.authority)

    def become(scope: str) -> None:
        theirs = cluster.files_of(scope)
        files.certificate.write_bytes(theirs.certificate.read_bytes())
        files.key.write_bytes(theirs.key.read_bytes())

    become(EU)
    members = EtcdMembers.from_options(EtcdOptions.parse(cluster.options(tmp_path, NEAR, files)))
    asked = etcd_pb2.RangeRequest(key=b"shoal/region/eu-2/data/never")
    with pytest.raises(ShoalError) as refused:
        await members.range(asked)
    assert refused.value.code is Code.STORE_DENIED
    become(NEAR)
    assert not (await members.range(asked)).kvs
    await members.close()


async def test_users_are_made_once_and_more_of_them_while_others_write(tmp_path: Path) -> None:
    """A change of users makes etcd refuse what was on its way: nobody who writes may hear of that."""
    with etcd(tmp_path / "etcd", members=3, scopes=(EU,)) as found:
        assert found.authorise() == {"event": "authorised", "scopes": [EU], "changed": []}
        options = EtcdOptions.parse(found.options(Path(), "-", found.files))
        writing, written = True, 0

        async def write(store: EtcdStore) -> int:
            count = 0
            while writing:
                await store.commit(Transaction({f"n/{count % 50}": b"x"}))
                count += 1
            return count

        async with store_of(found, tmp_path / "store", EU) as store:
            writers = [asyncio.create_task(write(store)) for _ in range(4)]
            for number in range(20):
                changed = await authorise(options, (EU, f"region/new-{number}"))
                assert changed == (
                    f"role region-new-{number}",
                    f"role region-new-{number} for shoal/region/new-{number}/",
                    f"user region-new-{number}",
                    f"user region-new-{number} with role region-new-{number}",
                )
            writing = False
            written = sum(await asyncio.gather(*writers))
        assert written > 0


async def test_an_etcd_of_the_version_before_gets_users_and_keeps_its_state(tmp_path: Path) -> None:
    """It had one certificate for all, and no authentication."""
    with etcd(tmp_path / "etcd", members=3) as found:
        for scope in (EU, NEAR):
            store = await found.open(tmp_path / store_user_of(scope), scope)
            await store.commit(Transaction({"nodes/a": scope.encode()}))
            await store.close()
        found.stop()
        found.certify_users((EU, NEAR))
        await asyncio.to_thread(found.start)
        await asyncio.to_thread(found.authorise)
        for scope in (EU, NEAR):
            async with store_of(found, tmp_path / store_user_of(scope), scope) as store:
                kept = await store.read("nodes/a")
                assert kept is not None
                assert kept.value == scope.encode()
                assert store.recovery is None


async def test_a_right_too_many_is_taken_away(cluster: Etcd, tmp_path: Path) -> None:
    """Of the role and of the user, as somebody may have granted them by hand."""
    options = EtcdOptions.parse(cluster.options(Path(), "-", cluster.files))
    async with member_as(cluster, cluster.files) as member:
        everything = etcd_pb2.Permission(permType=etcd_pb2.Permission.READ, key=b"\0", range_end=b"\0")
        await member.auth.RoleGrantPermission(
            etcd_pb2.AuthRoleGrantPermissionRequest(name="region-eu", perm=everything), timeout=LIMIT_S
        )
        root = etcd_pb2.AuthUserGrantRoleRequest(user="region-eu", role="root")
        await member.auth.UserGrantRole(root, timeout=LIMIT_S)
    async with member_as(cluster, cluster.files_of(EU)) as member:
        await member.kv.Range(etcd_pb2.RangeRequest(key=b"shoal/region/eu-2/leader"), timeout=LIMIT_S)
    changed = await authorise(options, (EU, NEAR, FEDERATION))
    assert changed == ("role region-eu no longer for \0", "user region-eu no longer with role root")
    async with member_as(cluster, cluster.files_of(EU)) as member:
        with pytest.raises(grpc.aio.AioRpcError):
            await member.kv.Range(etcd_pb2.RangeRequest(key=b"shoal/region/eu-2/leader"), timeout=LIMIT_S)
    assert await authorise(options, (EU, NEAR, FEDERATION)) == ()


async def test_who_is_not_root_is_refused_before_anything_is_changed(cluster: Etcd) -> None:
    options = EtcdOptions.parse(cluster.options(Path(), "-", cluster.files_of(EU)))
    with pytest.raises(ShoalError) as refused:
        await authorise(options, (EU,))
    assert refused.value.code is Code.FIELD_INVALID
    assert "'region-eu'" in refused.value.refusal.found


@pytest.mark.parametrize(("who", "joins"), [(EU, False), ("root", False), ("member", True)])
def test_only_a_member_s_certificate_is_heard_where_members_meet(cluster: Etcd, who: str, joins: bool) -> None:
    """A region's made a member too: they were of one CA, and nothing told them apart."""
    files = {"root": cluster.files, "member": cluster._server}.get(who) or cluster.files_of(who)
    context = ssl.create_default_context(cafile=str(files.authority))
    context.load_cert_chain(files.certificate, files.key)
    (member,) = cluster.members
    connection = http.client.HTTPSConnection("127.0.0.1", member.peer_port, context=context, timeout=LIMIT_S)

    def ask() -> int:
        connection.request("GET", "/members")
        return connection.getresponse().status

    try:
        if joins:
            assert ask() == 200
        else:
            with pytest.raises(OSError):  # an alert of TLS, or its end, as it comes first
                ask()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("given", "code"),
    [((), Code.FIELD_MISSING), (("root",), Code.FIELD_INVALID), (("region/eu", "region/../x"), Code.NAME_INVALID)],
)
def test_a_scope_is_a_role_and_a_name(given: tuple[str, ...], code: Code) -> None:
    """What is none would be a prefix that somebody else's begins with."""
    parsed = parser_of({}).parse_args(["etcd-users", *(f"--scope={each}" for each in given)])
    with pytest.raises(ShoalError) as refused:
        scopes_of(parsed)
    assert refused.value.code is code


def test_scopes_come_by_flags_and_by_their_variable_each_once() -> None:
    parsed = parser_of({"SHOAL_ETCD_SCOPES": "region/eu, federation/eu"}).parse_args(
        ["etcd-users", "--scope=region/eu"]
    )
    assert scopes_of(parsed) == ("region/eu", "federation/eu")
    assert [*map(store_user_of, scopes_of(parsed))] == ["region-eu", "federation-eu"]
