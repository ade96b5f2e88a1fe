"""Shoal's data plane beside other servers, in one run: `shoal bench serving`.

All servers serve the same models (64 floats and 1 and 4 MB returned as they are, PP-OCR's angle classifier, magika) to
the same client, h2load with bodies made beforehand: Shoal's front and its gateway (TLS, bearer token), Envoy before the
front (TLS on both sides), Triton with its Python backend, MLServer, Ray Serve, LitServe, a plain grpc.aio server, and
ONNX Runtime in process. Those that speak TLS are measured with it and without; Shoal has no port without. Triton's HTTP
port has none: Envoy before it ends the TLS of JSON. Every round asks each server each case in turn; figures are medians
of the rounds, ratios those within a round. First all servers share one core and the client has another one, then all
share two cores.

The two floors compare Shoal with ONNX Runtime in process, for a model that takes 1 to 2 ms there and one that takes 10
or more. Which these are depends on the machine: models of wheels are timed at the start, and of each range the shortest
is served too. It is named with its time before the last line; a range without a model has no figure.

Every answer is compared with ONNX Runtime's before a round, and the bytes of all answers are counted, because a refusal
of gRPC is no error of HTTP. A peer that is not installed is named, and what is compared with it is null:
`shoal bench serving --install DIR` installs all (0.7 GB of downloads). Needs h2load (Debian's nghttp2-client). As root
everything runs in a network namespace of its own, which Ray Serve needs: it listens on all addresses.

With `--compiled` Shoal's programs run the modules that `make compiled` has compiled in dist/compiled, and a line says
that they do. The last line is one JSON object; what its keys compare is printed above it.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc
from _compiled import FOLDER, environment_of
from _machine import machine_line
from _serving import figures as f
from _serving import h2load, layers
from _serving.envoy import running_envoy
from _serving.floor import Floor, running_floor
from _serving.h2load import LoadError, LoadSample
from _serving.models import SERVED, ServedModel, served_model
from _serving.peers import STARTS, AbsentError, PeerSettings, install, running_peers, tool
from _serving.processes import cpu_between, cpu_shares, cpu_times, memory, on_core
from _serving.region import LocalRegion, local_region
from _serving.servers import Protocol, Server, check_answer, infer_request, ready_request

NAMESPACE: Final = "SHOAL_BENCH_NAMESPACE"
"""Set in the environment of a run that has a network namespace of its own."""
QUICK_PEERS: Final = ("triton",)
SERVER_CORE: Final = (0,)
CLIENT_CORE: Final = (1,)
IDLE_S: Final = 2.0
WATCHED_S: Final = 8
FIRST: Final = 4
"""Requests for each one in flight, in the round that finds how many a round needs."""
MOST: Final = 200_000
BATCHING_S: Final = 300.0
CANDIDATE_S: Final = 0.5
"""A model for a floor is timed for so long."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    # Rounds over all cases.
    rounds: int
    # Least time of a case in a round.
    seconds: float
    # Peers to start, by their names in STARTS.
    peers: frozenset[str]
    # Folder of the peers' environments.
    environments: Path
    # True: the CPU of a small request by layer too.
    where: bool
    # No round begins when it would end later, by the monotonic clock.
    until: float
    # Folder of the compiled modules that Shoal's programs run. None: they run Python.
    compiled: Path | None


class Bench:
    """Servers that run, and what was measured of them."""

    def __init__(self, plan: Plan, models: Mapping[str, ServedModel], figures: f.Figures, *, is_pinned: bool) -> None:
        self._plan = plan
        self._models = models
        self._figures = figures
        self._client = CLIENT_CORE if is_pinned else None
        self._counts: dict[tuple[str, str], int] = {}
        self._failed: set[tuple[str, str]] = set()

    def run(self, cases: Sequence[f.Case], servers: Sequence[Server], floor: Floor) -> None:
        for number in range(self._plan.rounds + 1):
            began = time.monotonic()
            for case in cases:
                for server in servers:
                    self._measure(number, case, server)
                if number and case.has_floor:
                    self._measure_floor(number, case, floor)
            took = time.monotonic() - began
            print(f"# round {number} of {self._plan.rounds}: {took:.0f} s", flush=True)
            if number and number < self._plan.rounds and time.monotonic() + took > self._plan.until:
                print(f"# no time for the other {self._plan.rounds - number} rounds", flush=True)
                return

    def _measure(self, number: int, case: f.Case, server: Server) -> None:
        """One case of one server. Round 0 finds how many requests a round needs, and is not counted."""
        key = case.name, server.name
        protocol = protocol_of(case, server)
        if protocol is None or key in self._failed:
            return
        try:
            if not number and case.model:
                check_answer(server, protocol, self._models[case.model])
            sample = self._load(case, server, protocol, self._counts.get(key, FIRST * case.in_flight))
        except (LoadError, ValueError, OSError, grpc.RpcError) as error:
            self._failed.add(key)
            print(f"# failed: {server.name}, {case.name}: {' '.join(str(error).split())[:300]}", flush=True)
            return
        if number:
            self._figures.add(case, server.name, number, sample)
        self._counts[key] = min(MOST, max(case.least, case.in_flight, int(sample.per_s * self._plan.seconds)))

    def _load(self, case: f.Case, server: Server, protocol: Protocol, count: int) -> LoadSample:
        address = server.addresses[protocol]
        if not case.model:
            requests = [ready_request(address)]
        else:
            callers = server.callers if case.connections > 1 and server.callers else (address.headers,)
            model = self._models[case.model]
            requests = [infer_request(protocol, replace(address, headers=each), model) for each in callers]
        limit_s = 4 * self._plan.seconds
        with ExitStack() as beside:
            if case.flood:
                flood = replace(requests[0], headers=(*requests[0].headers[:2], *server.flooder))
                most_s = int(limit_s + h2load.EXTRA_S)
                beside.enter_context(h2load.background(flood, case.flood, most_s, self._client))
            before = cpu_times(server.processes())
            sample = h2load.run(
                requests, count, case.in_flight, case.connections, self._client, limit_s, is_steady=case.connections > 1
            )
        return replace(sample, cpu_s=cpu_between(before, cpu_times(server.processes())))

    def _measure_floor(self, number: int, case: f.Case, floor: Floor) -> None:
        found = floor.ask(case.model, self._plan.seconds)
        used = {"python": found["cpu_s"]}
        sample = LoadSample(int(found["count"]), found["per_s"], found["p50_s"], found["p99_s"], used)
        self._figures.add(case, f.FLOOR, number, sample)

    def show_layers(self, region: LocalRegion, scratch: Path) -> None:
        """The CPU of a small request by layer: front and worker, and gateway."""
        program = tool(self._plan.environments, "py-spy")
        if program is None:
            print(f"# no layers: py-spy is not in {self._plan.environments}: shoal bench serving --install")
            return
        model = self._models[f.SMALL_16.model]
        for server, roles in ((region.front, f.ROLES_OF_A_REQUEST), (region.gateway, ("gateway",))):
            try:
                costs = {role: self._figures.median(f.SMALL_16, server.name, f.cpu_us(role)) for role in roles}
            except f.MissingFigure as error:
                print(f"# no layers of {server.name}: {error}")
                continue
            request = infer_request(Protocol.GRPC, server.addresses[Protocol.GRPC], model)
            with h2load.background(request, f.SMALL_16.in_flight, WATCHED_S + 4, self._client):
                busiest = {role: _busiest(server.processes()[role]) for role in roles}
                try:
                    folded = layers.watch(program, busiest.values(), WATCHED_S, scratch, self._client)
                except OSError as error:
                    print(f"# no layers of {server.name}: {error}")
                    continue
            for role in roles:
                of = layers.count_layers(folded[busiest[role]])
                print("\n".join(layers.table(f"{server.name}, {role}", of, costs[role])), flush=True)


def protocol_of(case: f.Case, server: Server) -> Protocol | None:
    """By which protocol the server is asked the case; None: not at all."""
    if case.only and server.name not in case.only:
        return None
    asked = (Protocol.JSON, Protocol.OWN_JSON) if case.is_json else (Protocol.GRPC,)
    return next((protocol for protocol in asked if protocol in server.addresses), None)


def _busiest(pids: Iterable[int]) -> int:
    """The process that takes most CPU in half a second."""
    each = {pid: {"": [pid]} for pid in pids}
    used = cpu_shares({str(pid): roles for pid, roles in each.items()}, 0.5)
    return max(each, key=lambda pid: used[str(pid)])


def measure(
    plan: Plan, models: Mapping[str, ServedModel], figures: f.Figures, folder: Path, *, is_pinned: bool
) -> None:
    """One phase: everything is started, measured and ended. is_pinned: servers on one core, the client on another."""
    cores = SERVER_CORE if is_pinned else None
    parallel = 1 if is_pinned else os.cpu_count() or 1
    certificate, key = _certificate(folder)
    settings = PeerSettings(
        plan.environments, folder, dict(models), certificate, key, cores, parallel, NAMESPACE in os.environ, plan.peers
    )
    with ExitStack() as stack:
        region = stack.enter_context(local_region(folder / "region", models, cores, plan.compiled))
        servers = [region.front, region.gateway]
        peers = stack.enter_context(running_peers(settings))
        proxies = [(f.ENVOY, region.front, Protocol.GRPC)]
        if is_pinned:  # the others are asked nothing in JSON
            proxies += [(f.ENVOY_TRITON, peer, Protocol.JSON) for peer in peers if peer.name == f.TRITON]
        for name, behind, protocol in proxies:
            try:
                servers.append(stack.enter_context(running_envoy(settings, name, behind, protocol)))
            except AbsentError as error:
                print(f"# absent: {name}: {error}", flush=True)
        servers += peers
        floor = stack.enter_context(running_floor(folder / "models.json", parallel, on_core(cores, [])))
        bench = Bench(plan, models, figures, is_pinned=is_pinned)
        bench.run(f.ONE_CORE if is_pinned else figures.two_cores, servers, floor)
        idle = cpu_shares({server.name: server.processes() for server in servers}, IDLE_S)
        print(
            f"\n{'one core' if is_pinned else 'two cores':26} {'start s':>8} {'PSS MiB':>8} {'RSS':>6} {'idle CPU':>9}"
        )
        for server in servers:
            used, share = memory(server.processes()), idle[server.name]
            start = "-" if server.start_s is None else f"{server.start_s:.2f}"
            print(f"{server.name:26} {start:>8} {used.pss / 2**20:>8.0f} {used.rss / 2**20:>6.0f} {share:>9.1%}")
        if is_pinned and plan.where:
            print()
            bench.show_layers(region, folder)
        print(flush=True)


def time_candidates(folder: Path) -> tuple[dict[str, ServedModel], dict[str, float]]:
    """The models of which the floors may be, and the seconds of CPU that a run of each takes in process, on one thread:
    as many as pass where nothing else runs. By those that pass, other programs would choose."""
    models = {name: served_model(name, folder) for name in f.FLOOR_CANDIDATES}
    spec = folder / "candidates.json"
    spec.write_text(json.dumps({name: model.spec() for name, model in models.items()}))
    with running_floor(spec, 1, on_core(SERVER_CORE, [])) as floor:
        for name in models:
            floor.ask(name, 0.0)  # the first runs take longer
        asked = {name: floor.ask(name, CANDIDATE_S) for name in models}
    return models, {name: found["cpu_s"] / found["count"] for name, found in asked.items()}


def join_batching(figures: f.Figures, plan: Plan) -> None:
    """The figure of `shoal bench batching`, which also judges it."""
    program = str(Path(__file__).with_name("batching.py"))
    command = [sys.executable, program, "--rounds", str(plan.rounds), "--seconds", str(math.ceil(plan.seconds))]
    try:
        environment = environment_of(plan.compiled) if plan.compiled is not None else None
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BATCHING_S, env=environment)
    except subprocess.TimeoutExpired:
        print(f"# failed: {program}: no end within {BATCHING_S:g} s", flush=True)
        return
    try:
        figures.others["batching_gain"] = json.loads(done.stdout.splitlines()[-1])["batching_gain"]
    except (ValueError, KeyError, IndexError):
        print(f"# failed: {program}: {' '.join(done.stderr.split())[-300:]}", flush=True)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key of the peers, made here."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def enter_namespace() -> None:
    """Start this program again in a network namespace of its own, where that is possible."""
    if os.geteuid() or NAMESPACE in os.environ or not (shutil.which("unshare") and shutil.which("ip")):
        return
    os.environ[NAMESPACE] = "1"
    script = 'ip link set lo up && exec "$@"'
    os.execvp("unshare", ["unshare", "-n", "--", "sh", "-c", script, "sh", sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="install the peers into this folder, and end")
    parser.add_argument("--peers", type=Path, metavar="DIR", default=Path(".bench-peers"), help="where they are")
    parser.add_argument("--only", nargs="*", choices=[*STARTS], default=None, help="peers to start, besides Envoy")
    parser.add_argument("--quick", action="store_true", help="about four minutes: one short round, Triton alone")
    parser.add_argument("--where", action="store_true", help="the CPU of a small request by layer")
    parser.add_argument("--rounds", type=int, default=None, help="3")
    parser.add_argument("--seconds", type=float, default=None, help="of a case in a round: 1.5")
    parser.add_argument("--minutes", type=float, default=20.0, help="no round begins that would end later")
    help_ = f"Shoal's programs run what `make compiled` has compiled there ({FOLDER})"
    parser.add_argument("--compiled", type=Path, metavar="DIR", nargs="?", const=FOLDER, default=None, help=help_)
    options = parser.parse_args()
    if options.install:
        install(options.install)
        return
    if shutil.which("h2load") is None:
        sys.exit("h2load is missing: apt-get install nghttp2-client")
    if (os.cpu_count() or 1) < 2:
        sys.exit("one core: servers and client need one each")
    enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all servers are ended
    plan = Plan(
        options.rounds or (1 if options.quick else 3),
        options.seconds or (0.4 if options.quick else 1.5),
        frozenset(options.only if options.only is not None else QUICK_PEERS if options.quick else STARTS),
        options.peers.absolute(),
        options.where,
        time.monotonic() + 60 * options.minutes,
        options.compiled.absolute() if options.compiled is not None else None,
    )
    print(machine_line(), flush=True)
    print("# Triton's HTTP port, MLServer's ports and Ray Serve's gRPC port have no TLS", flush=True)
    figures = f.Figures()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        candidates, figures.candidates = time_candidates(Path(scratch))
        print(f"# in process: {f.candidates_line(figures.candidates)}", flush=True)
        models = {name: served_model(name, Path(scratch)) for name in SERVED}
        for is_pinned in (True, False):
            folder = Path(scratch) / ("one" if is_pinned else "two")
            folder.mkdir()
            if not is_pinned:
                models |= {case.model: candidates[case.model] for case in figures.two_cores if case.model in candidates}
            measure(plan, models, figures, folder, is_pinned=is_pinned)
    join_batching(figures, plan)
    print("\n".join(f.table(figures)))
    values, missing = f.summary(figures)
    print()
    for line in f.legend(figures):
        print(f"# {line}")
    for reason in missing:
        print(f"# null: {reason}")
    print(json.dumps(values))


if __name__ == "__main__":
    main()
