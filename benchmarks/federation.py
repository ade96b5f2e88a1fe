"""What federation costs: bids a second, time from solicit to award, and control traffic: `shoal bench federation`.

Real processes: a federation and a coordinator for each region, each with a CA of its own, with TLS and signatures as in
production. Only nodes are stubs: link peers that report every assignment ready at once. Figures are ratios to a call of
the same kind without a decision: a signed solicitation that is declined because its region may not trade.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import grpc
import grpc.aio

from shoal.client import Context, RegionClient
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.agreement import Release
from shoal.types.device import Role
from shoal.types.offer import Decline, Demand, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.units import PerSecond, Seconds
from shoal.types.workload import Limits, Requirements, Spread, Standby, WorkloadKey
from shoal.v1 import federation_pb2, federation_pb2_grpc, operator_pb2
from shoal.wire import nouns, signed_envelope
from shoal.wire.identity import dns_of
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.cluster.coordinator import CoordinatorServer
from harness.cluster.federation import NAME, FederationProcesses, federation_of
from harness.fakes.link_peers import LinkPeer, LinkPeers
from harness.models.synthetic import relu
from harness.wait import wait_until

HOME = "home"
SELLER = "seller"
BUYERS, STRANGERS = 24, 8
"""Enough callers, because a coordinator accepts 100 solicitations of one region at once, then 20 a second."""
AT_ONCE = 8
VALID_S = Seconds(3600.0)
TIMEOUT_S = 150.0
AGREEMENTS = 10
CALL_S = 20.0


@dataclass(frozen=True, slots=True)
class Bids:
    """Bids of one coordinator. A call alone is a declined solicitation; *_s: median of sequential calls, in seconds;
    *_per_s: calls a second with `AT_ONCE` in flight."""

    # Nodes of the region.
    nodes: int
    # Workloads that the region itself runs.
    workloads: int
    # Seconds of a declined solicitation.
    alone_s: float
    # Declined solicitations a second.
    alone_per_s: float
    # Seconds of an indicative bid, which holds nothing.
    what_if_s: float
    # Indicative bids a second.
    what_if_per_s: float
    # Seconds of a bid that holds capacity, and its release.
    held_s: float
    # Such bids, each with its release, a second.
    held_per_s: float


@dataclass(frozen=True, slots=True)
class Trades:
    """Negotiations of one region, `home`, with the others. Times are medians over `negotiations`. Bytes are what a
    region sends and receives by TCP in a minute, to and from the federation and other regions."""

    # Regions of the federation, `home` included.
    regions: int
    # Negotiations that were timed.
    negotiations: int
    # Seconds of a declined solicitation.
    call_s: float
    # Seconds from solicit to award.
    award_s: float
    # Seconds from solicit to grant.
    grant_s: float
    # The longest time from solicit to grant, in seconds.
    grant_worst_s: float
    # Median number of regions that answered with a bid.
    asked: float
    # At rest; the mean of all regions.
    rest_bytes: float
    # Of `home` with `AGREEMENTS` in force.
    agreed_bytes: float
    # Of `home` while it also negotiates all the time.
    trading_bytes: float
    # Negotiations a minute while `trading_bytes` was measured.
    negotiations_a_minute: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[10, 100], help="of the region that bids")
    parser.add_argument("--regions", type=int, nargs="*", default=[2, 10], help="of the federation; 50: 6 GB of memory")
    parser.add_argument("--count", type=int, default=300, help="bids of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="to count bytes for")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bids, trades = [], []
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            bids.append(measure_bids(Path(folder), nodes, options.count))
        if not options.json:
            _print_bids(bids[-1])
    for regions in options.regions:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            trades.append(measure_trades(Path(folder), regions, options.seconds))
        if not options.json:
            _print_trades(trades[-1])
    if options.json:
        print(json.dumps({"bids": [asdict(each) for each in bids], "trades": [asdict(each) for each in trades]}))


def _print_bids(found: Bids) -> None:
    print(
        f"{found.nodes} nodes, {found.workloads} workloads: "
        f"a call alone {found.alone_s * 1e3:.1f} ms, {found.alone_per_s:.0f}/s; "
        f"what-if {found.what_if_s * 1e3:.1f} ms (x{found.what_if_s / found.alone_s:.1f}), {found.what_if_per_s:.0f}/s "
        f"(x{found.what_if_per_s / found.alone_per_s:.2f}); held and released {found.held_s * 1e3:.1f} ms "
        f"(x{found.held_s / found.alone_s:.1f}), {found.held_per_s:.0f}/s "
        f"(x{found.held_per_s / found.alone_per_s:.2f})",
        flush=True,
    )


def _print_trades(found: Trades) -> None:
    kib = {name: value / 1024 for name, value in asdict(found).items() if name.endswith("_bytes")}
    print(
        f"{found.regions} regions, {found.asked:.0f} answer: solicit to award {found.award_s * 1e3:.0f} ms "
        f"(x{found.award_s / found.call_s:.0f} a call alone of {found.call_s * 1e3:.1f} ms), to grant "
        f"{found.grant_s * 1e3:.0f} ms, at worst {found.grant_worst_s * 1e3:.0f} ms; KiB a region and minute: at rest "
        f"{kib['rest_bytes']:.0f}, home with {AGREEMENTS} agreements {kib['agreed_bytes']:.0f}, and with "
        f"{found.negotiations_a_minute:.0f} negotiations a minute {kib['trading_bytes']:.0f}",
        flush=True,
    )


# Bids of one coordinator


def measure_bids(folder: Path, nodes: int, count: int) -> Bids:
    with ExitStack() as stack:
        regions = stack.enter_context(federation_of(folder, SELLER))
        regions.join(SELLER)
        workloads = nodes // 2
        stack.enter_context(_run_nodes(regions, {SELLER: nodes}))
        _apply(regions, SELLER, _trade(SELLER, "buyer-*"), *(_workload(f"own-{n}", "") for n in range(workloads)))
        wait_until(lambda: _serving(regions, SELLER) == workloads, TIMEOUT_S, "its own workloads", every_s=0.5)
        members = [_Member.join(folder, regions, f"buyer-{n}") for n in range(BUYERS)]
        members += [_Member.join(folder, regions, f"stranger-{n}") for n in range(STRANGERS)]
        wait_until(
            lambda: len(_federation_view(regions, SELLER).members) == len(members) + 1, 60, "the region to know them"
        )
        address = _address(regions, SELLER)
        profile = _profile(regions, SELLER)
        return asyncio.run(_bids(members, address, regions.regions[SELLER], profile, nodes, workloads, count))


async def _bids(
    members: Sequence["_Member"],
    address: str,
    seller: CoordinatorServer,
    profile: ModelProfile,
    nodes: int,
    workloads: int,
    count: int,
) -> Bids:
    channels = {each.name: each.dial(address, seller) for each in members}
    stubs = {name: federation_pb2_grpc.PeerStub(channel) for name, channel in channels.items()}
    buyers, strangers = cycle(members[:BUYERS]), cycle(members[BUYERS:])
    numbers = iter(range(10**9))

    async def bid(member: _Member, message: federation_pb2.Said) -> federation_pb2.Said:
        reply: federation_pb2.Said = await stubs[member.name].Bid(message, timeout=CALL_S)
        return reply

    def prepare_call(of: Iterator[_Member], *, indicative: bool, kind: type) -> Callable[[], Awaitable[object]]:
        member = next(of)
        asked = _solicitation(member.name, f"s-{next(numbers)}", profile, indicative=indicative)
        message = member.signer.sign(asked, signed_envelope.ANYONE)

        async def call() -> None:
            reply = await bid(member, message)
            if reply.kind != signed_envelope.kind_of(kind):
                raise SystemExit(f"not a {kind.__name__}: {nouns.decode(Decline, reply.content).refusal}")
            if kind is Offer and not indicative:
                offer = nouns.decode(Offer, reply.content)
                over = member.signer.sign(Release(asked.id, offer.id, member.name), SELLER)
                await stubs[member.name].Release(over, timeout=CALL_S)

        return call

    kinds: dict[str, Callable[[], Callable[[], Awaitable[object]]]] = {
        "alone": lambda: prepare_call(strangers, indicative=True, kind=Decline),
        "what_if": lambda: prepare_call(buyers, indicative=True, kind=Offer),
        "held": lambda: prepare_call(buyers, indicative=False, kind=Offer),
    }
    figures = dict[str, float]()
    for make in kinds.values():
        for _ in range(BUYERS):
            await make()()
    for name, make in kinds.items():
        figures[f"{name}_s"] = statistics.median([await _time_call(make()) for _ in range(count)])
        calls = iter([make() for _ in range(count)])

        async def worker(calls: Iterator[Callable[[], Awaitable[object]]] = calls) -> None:
            for call in calls:
                await call()

        figures[f"{name}_per_s"] = count / await _time_call(lambda: asyncio.gather(*(worker() for _ in range(AT_ONCE))))
    await asyncio.gather(*(channel.close(None) for channel in channels.values()))
    return Bids(nodes, workloads, **figures)


async def _time_call(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Member:
    """A federation member whose keys this program holds; no process serves it."""

    name: str
    own: Enrolled
    signer: signed_envelope.RegionSigner

    @classmethod
    def join(cls, folder: Path, regions: FederationProcesses, name: str) -> "_Member":
        wall = CoordinatorClock().wall()
        authority = FileAuthority.open(folder / name, name, wall=wall, may_create=True)
        own = authority.enrol_self(Role.COORDINATOR, "coordinator", lifetime_s=VALID_S, wall=wall)
        signer = signed_envelope.RegionSigner(name, own.certificate_pem, own.key_pem)
        token = regions.token(name)
        request = federation_pb2.JoinRequest(
            token=token,
            region=name,
            address="127.0.0.1:1",
            roots=[own.ca_pem.decode()],
            proof=signer.sign_bytes(signed_envelope.JOIN, token.encode(), NAME),
        )
        ca = regions.federation.certificate(Role.VIEWER, "any").ca_pem
        options = channel_options(ENROL_BYTES, server_name=dns_of(NAME, Role.FEDERATION, "federation"))
        with grpc.secure_channel(regions.federation.enrol, grpc.ssl_channel_credentials(ca), options) as opened:
            federation_pb2_grpc.JoiningStub(opened).Join(request, timeout=CALL_S)
        return cls(name, own, signer)

    def dial(self, address: str, server: CoordinatorServer) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            server.certificate(Role.VIEWER, "any").ca_pem, self.own.key_pem, self.own.certificate_pem
        )
        name = dns_of(server.region, Role.COORDINATOR, "coordinator")
        return grpc.aio.secure_channel(address, credentials, channel_options(LINK_BYTES, server_name=name))


def _solicitation(origin: str, name: str, profile: ModelProfile, *, indicative: bool) -> Solicitation:
    return Solicitation(
        id=name,
        round=1,
        origin=origin,
        workload=WorkloadKey("default", "reader"),
        models=(profile,),
        require=Requirements(None, True, "", (), (), 1, Spread.NODE, Standby.NONE, None, False, None),
        limits=Limits(),
        weights={"latency": 0.5, "cost": 0.5},
        traffic=(Demand(origin, PerSecond(0.01), PerSecond(0.01)),),
        max_batch=1,
        term_s=Seconds(1800.0),
        answer_s=Seconds(5.0),
        indicative=indicative,
    )


# Negotiations of one region with the others


def measure_trades(folder: Path, count: int, seconds: float) -> Trades:
    names = (HOME, *(f"r-{number:02}" for number in range(1, count)))
    with ExitStack() as stack:
        regions = stack.enter_context(federation_of(folder, *names))
        stack.enter_context(_run_nodes(regions, {name: int(name != HOME) for name in names}))
        with ThreadPoolExecutor(8) as together:
            list(together.map(lambda name: _apply(regions, name, _trade(name, HOME)), names))
            list(together.map(regions.join, names))
        regions.wait_all_known(TIMEOUT_S)
        stranger = _Member.join(folder, regions, "stranger")
        bytes_ = _Bytes(regions)
        rest = statistics.mean(bytes_.a_minute(seconds).values())
        times = [_negotiation(regions, f"once-{number}") for number in range(AGREEMENTS)]
        call_s = asyncio.run(_baseline_call_s(stranger, regions, names[1]))
        for number in range(AGREEMENTS):
            _negotiation(regions, f"lasts-{number}", lasts=True)
        agreed = bytes_.a_minute(seconds)[HOME]
        done = list[Mapping[str, float]]()
        began = time.monotonic()
        with bytes_.measure() as counted:
            while time.monotonic() < began + seconds:
                done.append(_negotiation(regions, f"more-{len(done)}"))
        took = time.monotonic() - began
    return Trades(
        regions=count,
        negotiations=len(times),
        call_s=call_s,
        award_s=statistics.median(each["award_s"] for each in times),
        grant_s=statistics.median(each["grant_s"] for each in times),
        grant_worst_s=max(each["grant_s"] for each in times),
        asked=statistics.median(each["answers"] for each in times),
        rest_bytes=rest,
        agreed_bytes=agreed,
        trading_bytes=counted[HOME] * 60 / took,
        negotiations_a_minute=len(done) * 60 / took,
    )


def _negotiation(regions: FederationProcesses, name: str, *, lasts: bool = False) -> dict[str, float]:
    """Durations from the events of `home`. Without `lasts`, the agreement has ended when this returns."""
    with _region(regions, HOME) as api:
        before = max((event.sequence for event in api.events()), default=0)
        api.apply([operator_pb2.Document(name="bench.yaml", text=_workload(name, "when-infeasible"))])

        def granted_events() -> dict[str, operator_pb2.Event]:
            mine = [event for event in api.events(before) if event.workload.name == name]
            found = {event.code: event for event in reversed(mine)}
            return found if "GRANTED" in found else {}

        events = wait_until(granted_events, TIMEOUT_S, f"{name} to be granted", every_s=0.05)
        answers = sum(event.workload.name == name and event.code == "BID" for event in api.events(before))
        if not lasts:
            api.delete("workload", name)
            wait_until(lambda: not _agreements_of(api, name), TIMEOUT_S, f"{name} to be over", every_s=0.1)
    began = events["SOLICITED"].at
    return {
        "award_s": events["AWARDED"].at - began,
        "grant_s": events["GRANTED"].at - began,
        "answers": float(answers),
    }


def _agreements_of(api: RegionClient, name: str) -> list[str]:
    return [view.agreement for view in api.get("agreements").agreements if view.workload.name == name]


async def _baseline_call_s(member: _Member, regions: FederationProcesses, name: str) -> float:
    """Median seconds of a signed solicitation that is declined at once, because that region does not serve this one."""
    profile, took = _profile(regions, HOME), list[float]()
    async with member.dial(_address(regions, name), regions.regions[name]) as channel:
        stub = federation_pb2_grpc.PeerStub(channel)
        for number in range(50):
            asked = _solicitation(member.name, f"alone-{number}", profile, indicative=True)
            took.append(
                await _time_call(partial(stub.Bid, member.signer.sign(asked, signed_envelope.ANYONE), timeout=CALL_S))
            )
    return statistics.median(took)


class _Bytes:
    """TCP traffic between the processes as the kernel counts it (`ss`), TLS and HTTP/2 included."""

    def __init__(self, regions: FederationProcesses) -> None:
        self._pids = {
            process.process.pid: name for name, process in regions.regions.items() if process.process is not None
        }
        addresses = [_address(regions, name) for name in regions.regions]
        self._ports = {int(address.rpartition(":")[2]) for address in (*addresses, regions.federation.link)}

    def a_minute(self, seconds: float) -> dict[str, float]:
        with self.measure() as counted:
            time.sleep(seconds)
        return {name: count * 60 / seconds for name, count in counted.items()}

    @contextmanager
    def measure(self) -> Iterator[dict[str, float]]:
        """By region; filled when the block ends."""
        found = dict.fromkeys(self._pids.values(), 0.0)
        before = self._now()
        yield found
        for key, count in self._now().items():
            found[self._pids[key[0]]] += count - before.get(key, 0)

    def _now(self) -> dict[tuple[int, str, str], int]:
        """Bytes by process and connection."""
        told = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
        found = dict[tuple[int, str, str], int]()
        for line in told.splitlines():
            ends = line.split()[3:5]
            pid = re.search(r"pid=(\d+)", line)
            if pid is None or int(pid[1]) not in self._pids:
                continue
            if self._ports.isdisjoint(int(end.rpartition(":")[2]) for end in ends):
                continue
            counts = re.findall(r"bytes_(?:sent|received):(\d+)", line)
            found[int(pid[1]), ends[0], ends[1]] = sum(map(int, counts))
        return found


# Regions


@contextmanager
def _run_nodes(regions: FederationProcesses, agents: Mapping[str, int]) -> Iterator[None]:
    """Runs each region's gateway, its number of agents, and pushes the model."""
    ends = [end for name, count in agents.items() for end in _link_peers(regions.regions[name], count)]
    with LinkPeers(ends).live() as alive, ThreadPoolExecutor(8) as together:
        list(together.map(lambda name: _push(regions, name), agents))
        wait_until(alive.are_connected, TIMEOUT_S, "the nodes to be connected", every_s=0.2)
        yield


def _link_peers(process: CoordinatorServer, agents: int) -> Iterator[LinkPeer]:
    for number in range(agents + 1):
        role, name = (Role.GATEWAY, "gateway") if number == 0 else (Role.AGENT, f"agent-{number:04}")
        process.certificate(role, name, valid_s=VALID_S).write(process.folder / name)
        yield LinkPeer(process.folder / name, process.region, name, process.link, role, flops=1e11 + 1e9 * number)


def _push(regions: FederationProcesses, name: str) -> None:
    model = regions.regions[name].folder / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    with _region(regions, name) as api:
        api.push(model, "relu")


@contextmanager
def _region(regions: FederationProcesses, name: str) -> Iterator[RegionClient]:
    process = regions.regions[name]
    with RegionClient(Context("bench", name, process.link, str(process.data / "operator"))) as api:
        yield api


def _apply(regions: FederationProcesses, name: str, *texts: str) -> None:
    with _region(regions, name) as api:
        reply = api.apply([operator_pb2.Document(name="bench.yaml", text="---\n".join(texts))])
    if reply.problems:
        raise SystemExit(str(reply.problems))


def _serving(regions: FederationProcesses, name: str) -> int:
    with _region(regions, name) as api:
        return sum(view.state == "ready" for view in api.get("workloads").workloads)


def _profile(regions: FederationProcesses, name: str) -> ModelProfile:
    with _region(regions, name) as api:
        return nouns.from_wire(ModelProfile, api.models("relu")[0].profile)


def _federation_view(regions: FederationProcesses, name: str) -> operator_pb2.FederationView:
    view = regions.federation_view(name)
    assert view is not None, f"{name} is in no federation"
    return view


def _address(regions: FederationProcesses, name: str) -> str:
    return next(str(one.address) for one in _federation_view(regions, name).members if one.region == name)


def _trade(name: str, partner: str) -> str:
    return (
        f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: {name}}}\n"
        f'spec: {{price: 1.0 USD/h, trade: [{{with: "{partner}", hold_share: 100 %}}]}}\n'
    )


def _workload(name: str, delegate: str) -> str:
    policy = f"federation: {{delegate: {delegate}}}" if delegate else "optimize: {latency: 0.5, cost: 0.5}"
    return (
        f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {{{policy}}}\n---\n"
        f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: {name}}}\n"
        f"spec: {{model: {{source: relu}}, policy: {name}}}\n"
    )


if __name__ == "__main__":
    main()
