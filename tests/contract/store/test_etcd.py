"""What the etcd store owes beyond the suite of every store: true answers when etcd's get lost, and several members."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.faults.disk import SeededRng
from harness.servers.etcd import Etcd, etcd
from shoal.coordinator.ports import StaleRevision, StoreOptions, Transaction
from shoal.coordinator.store.etcd import members as calls
from shoal.coordinator.store.etcd.members import FIRST_TRY_S, EtcdMember, EtcdMembers, Pem
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.etcd import etcd_pb2
from shoal.types.codes import Code, ShoalError


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@dataclass
class Lossy:
    """A member's KV whose transactions, or their answers, are lost as `plan` says: n: not, r: request, a: answer,
    l: the request arrives when all is over. Without a plan nothing is."""

    kv: Any
    plan: list[str] = field(default_factory=list)
    late: list[Any] = field(default_factory=list)

    def Range(self, request: Any, **how: Any) -> Any:
        return self.kv.Range(request, **how)

    async def Txn(self, request: Any, **how: Any) -> Any:
        fate = self.plan.pop(0) if self.plan else "n"
        if fate == "l":
            self.late.append(request)
        if fate in "na":
            answer = await self.kv.Txn(request, **how)
            if fate == "n":
                return answer
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, f"lost: {fate}", None)

    async def send_late(self) -> None:
        for request in self.late:
            await self.kv.Txn(request)
        self.late.clear()


def lossy(store: EtcdStore) -> Lossy:
    (member,) = store.members._members
    loss = Lossy(member.kv)
    store.members._members = (replace(member, kv=loss),)  # type: ignore[arg-type]
    return loss


async def test_what_is_told_of_a_write_is_true_whatever_gets_lost(
    cluster: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 appends to one list; of each, up to three tries or answers are lost or late. None is ever there twice."""
    monkeypatch.setattr(calls, "PAUSE_S", 0.0)
    store = await cluster.open(tmp_path)
    loss, chance, acknowledged = lossy(store), SeededRng(7), []
    record = None
    for number in range(300):
        loss.plan = ["nral"[chance.below(4)] for _ in range(chance.below(4))]
        blind = chance.below(2) == 0
        value = (record.value if record else b"") + b"%d," % number
        expect = {} if blind else {"list": record.revision if record else 0}
        revision = await store.commit(Transaction({"list": value, f"n/{number:03}": b"x"}, expect=expect))
        acknowledged.append(number)
        await loss.send_late()
        record = await store.read("list")
        assert record is not None
        assert (record.value, record.revision) == (value, revision)
        if not blind:
            loss.plan = ["nral"[chance.below(4)] for _ in range(chance.below(4))]
            with pytest.raises(StaleRevision):
                await store.commit(Transaction({"list": b"never"}, expect={"list": revision - 1}))
            await loss.send_late()
    assert [int(each.key[2:]) for each in await store.scan("n/")] == acknowledged
    await store.close()


@pytest.mark.parametrize("fate", ["r", "a", "l"])
async def test_a_write_that_was_given_up_is_cleared_up_before_the_next(
    cluster: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """It happened: the coordinator is told to read again. It did not: it never does, however late it arrives."""
    monkeypatch.setattr(calls, "PAUSE_S", 0.0)
    store = await cluster.open(tmp_path)
    first = await store.commit(Transaction({"a": b"1"}))
    loss = lossy(store)
    call = store.members.call

    async def impatient(ask: Any, **how: Any) -> Any:
        return await call(ask, **{**how, "timeout_s": 0.0})

    monkeypatch.setattr(store.members, "call", impatient)
    loss.plan = [fate]
    with pytest.raises(ShoalError) as unknown:
        await store.commit(Transaction({"a": b"2"}, expect={"a": first}))
    assert unknown.value.code is Code.STORE_UNAVAILABLE
    assert "not known whether this write happened" in str(unknown.value)
    if fate == "a":
        with pytest.raises(ShoalError) as told:
            await store.commit(Transaction({"b": b"1"}))
        assert told.value.code is Code.STORE_UNAVAILABLE
        assert store.stale.is_set()
        await store.close()
        store = await cluster.open(tmp_path)
        assert await store.commit(Transaction({"b": b"1"})) > first
    else:
        await store.commit(Transaction({"b": b"1"}))
        await loss.send_late()
        assert not store.stale.is_set()
    record = await store.read("a")
    assert record is not None
    assert record.value == (b"2" if fate == "a" else b"1")
    await store.close()


async def test_an_old_copy_of_etcd_is_told_from_the_state_that_was_acknowledged(tmp_path: Path) -> None:
    """Restored while the coordinator was down, and under its hands."""
    with etcd(tmp_path / "etcd") as one:
        store = await one.open(tmp_path / "store")
        for number in range(3):
            await store.commit(Transaction({"a": b"%d" % number}))
        await store.close()
        running = await one.open(tmp_path / "other", scope="other")
        await running.commit(Transaction({"a": b"1"}))
        one.stop()
        one.wipe()
        one.start()
        with pytest.raises(ShoalError) as gone:
            await running.commit(Transaction({"a": b"2"}))
        assert gone.value.code is Code.STORE_CORRUPT
        assert running.stale.is_set()
        await running.close()
        store = await one.open(tmp_path / "store")
        assert store.recovery is not None
        assert store.recovery.code is Code.STORE_CORRUPT
        await store.backup()
        await store.close()


async def test_a_member_that_cannot_be_reached_has_no_more_than_its_first_time(tmp_path: Path) -> None:
    """As one that died, in each round of those asked while the others elect a leader and answer nothing."""
    with etcd(tmp_path, members=3) as found:
        certificate, key, ca = found.files.read()
        asked = EtcdMembers(found.endpoints, lambda: Pem(ca, certificate, key))
        found.members[0].pause()
        silent = found.endpoints[0]
        limits: list[tuple[str, float]] = []

        async def ask(member: EtcdMember, limit_s: float) -> etcd_pb2.RangeResponse:
            limits.append((member.endpoint, limit_s))
            answer = await member.kv.Range(etcd_pb2.RangeRequest(key=b"k"), timeout=limit_s)
            if len(limits) > 6:
                return answer
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "no leader", None)

        await asked.call(ask, exact=False)
        await asked.close()
    of_silent = [limit_s for endpoint, limit_s in limits if endpoint == silent]
    of_others = [limit_s for endpoint, limit_s in limits if endpoint != silent]
    assert len(of_silent) >= 3
    assert set(of_silent) == {FIRST_TRY_S}
    assert of_others[-1] > FIRST_TRY_S, "they have more, the longer it takes"


async def test_several_share_one_etcd(cluster: Etcd, tmp_path: Path) -> None:
    one, other = await cluster.open(tmp_path / "1", "region/eu"), await cluster.open(tmp_path / "2", "region/eu-2")
    await one.commit(Transaction({"a": b"1"}))
    assert await other.scan("") == ()
    assert await other.commit(Transaction({"a": b"2"}, expect={"a": 0})) > 0
    record = await one.read("a")
    assert record is not None
    assert record.value == b"1"
    await asyncio.gather(one.close(), other.close())


async def test_more_than_one_page_is_of_one_moment(
    cluster: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.coordinator.store.etcd.store.PAGE", 7)
    store = await cluster.open(tmp_path)
    await store.commit(Transaction({f"k/{number:02}": b"old" for number in range(40)}))
    assert len(await store.scan("k/")) == 40
    assert len(await store.scan("k/", limit=20)) == 20
    await store.close()


async def test_etcd_without_certificates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as refused:
        await EtcdStore.from_options(StoreOptions(tmp_path, "region/eu", {"endpoints": "127.0.0.1:1"}))
    assert refused.value.code is Code.TLS_REQUIRED
    with pytest.raises(ShoalError) as nowhere:
        await EtcdStore.from_options(StoreOptions(tmp_path, "region/eu"))
    assert nowhere.value.code is Code.FIELD_MISSING


async def test_too_much_for_one_transaction_is_refused_with_the_flags_that_help(cluster: Etcd, tmp_path: Path) -> None:
    store = await cluster.open(tmp_path)
    with pytest.raises(ShoalError) as refused:
        await store.commit(Transaction({f"k/{number}": b"" for number in range(11_000)}))
    assert refused.value.code is Code.TOO_LARGE
    assert "--max-txn-ops" in refused.value.refusal.remedy
    await store.commit(Transaction({"k": b""}))
    await store.close()


async def test_a_certificate_that_replaced_the_one_in_use_is_taken_up(tmp_path: Path) -> None:
    """etcd has another CA, and the files are of that: the open store and its watch go on without a restart."""
    with etcd(tmp_path / "etcd") as one:
        store = await one.open(tmp_path / "store")
        before = await store.commit(Transaction({"a": b"1"}))
        watching = store.watch("a", before)
        told = asyncio.ensure_future(anext(watching))
        one.stop()
        one.replace_certificates()
        await asyncio.to_thread(one.start)
        revision = await store.commit(Transaction({"a": b"2"}))
        change = await asyncio.wait_for(told, 20.0)
        assert (change.value, change.revision) == (b"2", revision)
        await store.close()
