"""A day and a night: joules of a workload that Shoal moves so that a server can sleep, beside one with a static
placement.

Real processes (coordinator, agents, workers, gateway), real requests and live migrations; the devices are EMULATED: two
servers with an NVIDIA L4 and one small board, paced and metered by their profiles. `shoal get devices -o json` names
the source of each figure and which ones are assumed: a sleeping server's power, and its time to wake. Two workloads of
one model get the same requests at the same time:

- `bound` stays on the first server all day, as it must for its peak, which the board cannot handle: static placement on
  the device that handles the peak. Its server idles at its profile's idle watts, not at those of work.
- `moved` optimises energy and declares its peak. Shoal keeps it on the board outside the peak while the second server
  sleeps, wakes that server before the peak, and migrates the workload there and back, live and verified.

Time is compressed: the day's 24 h take `--day` seconds. The peak, a server's time to wake (260 s of 24 h) and
`cooldown` are compressed with it. Shoal's own times are not: how long a condition must hold, loading, comparing,
shifting and draining last as long as on any day, and so take a larger share of this one. The measured saving is
therefore below that of a 24 h day; `limit` is the saving if a server were awake only for the peak and to wake.

Watts are means over the day, in the devices' own time: emulated devices answer `time scale` times slower than real
ones, and count their joules by their own seconds. Servers meter themselves. No source gives the board's power at rest,
so it counts as if it worked all day, and counts for `moved` alone. Networks and the coordinator are not metered.
"""

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx
from _machine import machine_line
from onnx import TensorProto, helper, numpy_helper

from shoal.agent.devices.emulated import load_profile
from shoal.agent.devices.published import pace_of
from shoal.agent.worker.pace import model_pace
from shoal.client import Context, Contexts, InferenceClient, RegionClient
from shoal.devstack.control import Control
from shoal.devstack.layout import StackOptions
from shoal.types.assignment import Work
from shoal.types.codes import ShoalError
from shoal.types.units import Bytes
from shoal.v1 import nouns_pb2, operator_pb2

DAY_S = 86400.0
BOUND, SERVER, BOARD = "bound-gpu", "cloud-gpu", "board"
CHANNELS = 64
MODEL_FLOPS = 1e9
"""Of the model. Small enough for this machine to keep up with two workloads at the peak, and to compare answers in
seconds: comparing is not compressed with the day."""
TOLERANCE = 1e-3
"""Absolute tolerance of an answer, which is the mean of many equal numbers, summed in fp32."""
CLIENTS = 24
SLO_TIMES = 6.0
"""The bound on p95, in multiples of the board's time for one request."""
COOLDOWN_S = 600.0
"""Seconds of a day of 24 h."""
SETTLE_S = 60.0
"""Seconds until both workloads serve and the second server sleeps."""
METER_S = 1.0


@dataclass
class WorkloadOutcomes:
    """One workload's requests."""

    name: str
    # For each request: when it was due (Unix time), seconds from then to the answer, and "ok", "wrong" or an error
    # code.
    outcomes: list[tuple[float, float, str]] = field(default_factory=list)

    def p95(self, chosen: Callable[[float], bool], scale: float) -> float:
        """Seconds of the devices' own time; NaN without a successful request."""
        taken = [took for at, took, code in self.outcomes if code == "ok" and chosen(at)]
        return float(np.quantile(taken, 0.95)) / scale if taken else math.nan

    def count(self, *codes: str) -> int:
        return sum(code in codes for _, _, code in self.outcomes)


@dataclass(frozen=True)
class DayLoad:
    """The load of one day, from what paces the devices. Rates are in this machine's time."""

    # Width and height of the tensors that the model convolves.
    side: int
    # Requests a second outside the peak.
    night_rate: float
    # Requests a second in the peak.
    peak_rate: float
    # Share of the server's time that requests take in the peak.
    peak_of_server: float
    # Share of the board's time that requests take outside the peak.
    night_of_board: float
    # Share of the board's time that requests would take in the peak; may exceed 1.
    peak_of_board: float
    # Bound on p95, in seconds of the devices' own time.
    slo_own_s: float


@dataclass(frozen=True)
class DayReport:
    """Results of one day. Watts are means over the day, in the devices' own time; dictionaries are by workload."""

    # Profile of the board.
    device: str
    # Seconds that the day took here.
    day_s: float
    # How many times shorter than 24 h the day was.
    compressed: float
    # How many times slower than real ones the emulated devices answer.
    time_scale: float
    # Share of the day that the peak takes.
    peak_share: float
    # The load that was sent.
    load: DayLoad
    # Seconds here that a server takes to wake.
    wake_s: float
    # Requests sent.
    requests: dict[str, int]
    # Requests without an answer.
    failed: dict[str, int]
    # Requests with a wrong answer.
    wrong: dict[str, int]
    # p95 latency outside the peak, in seconds of the devices' own time; NaN without answers.
    p95_night_s: dict[str, float]
    # p95 latency in the peak, likewise.
    p95_peak_s: dict[str, float]
    # Watts of `bound`'s server.
    bound_w: float
    # Watts of `moved`'s server: the sum of the three parts below.
    server_w: float
    # The part of `server_w` while it slept.
    server_asleep_w: float
    # The part of `server_w` in the peak.
    server_peak_w: float
    # The rest of `server_w`: waking, migrating, waiting.
    server_else_w: float
    # Watts of the board as if it worked all day.
    board_w: float
    # Watts of `moved`: server and board.
    moved_w: float
    # Watts of `moved` if the server were awake only for the peak and to wake.
    limit_w: float
    # 1 - moved_w / bound_w.
    saved: float
    # 1 - limit_w / bound_w.
    limit: float
    # `saved` if a sleeping server drew its idle watts.
    saved_if_asleep_drew_idle: float
    # Share of the day that the second server slept.
    asleep_share: float
    # Seconds here between the second server's waking and the peak.
    awake_before_s: float
    # Seconds here between the peak and the second server's falling asleep.
    awake_after_s: float
    # One line for each migration, oldest first.
    moves: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--day", type=float, default=360.0, help="seconds that a day takes")
    parser.add_argument("--peak", type=float, default=4 / 24, help="share of the day; the peak is in its middle")
    parser.add_argument("--peak-load", type=float, default=0.4, help="of the server's time, that requests take then")
    parser.add_argument("--night", type=float, default=1 / 8, help="requests outside the peak, of those in it")
    parser.add_argument("--board", default="orin-nx-16g", help="the small device's profile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(machine_line(), file=sys.stderr if arguments.json else sys.stdout)
    fleet = (("plain-cpu", ""), (BOUND, "xr5610-l4"), (SERVER, "xr5610-l4"), (BOARD, arguments.board))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            asked = StackOptions(agents=len(fleet), fleet=fleet, wake_scale=arguments.day / DAY_S, relayed=False)
            up = control.up(asked, _log)
            with RegionClient(up.operator) as api:
                report = run(api, up.client, Path(scratch), up.stack.time_scale, arguments)
        finally:
            control.down()
    print(json.dumps(asdict(report), indent=1)) if arguments.json else show(report)


def run(api: RegionClient, client: Context, scratch: Path, scale: float, asked: argparse.Namespace) -> DayReport:
    devices = {row.node: row for row in api.get("devices").devices}
    load = plan_load(devices, scale, asked)
    model = scratch / "convolutions.onnx"
    model.write_bytes(convolutions(load.side))
    api.push(model, "convolutions")
    started = _now() + SETTLE_S
    first, last = (started + asked.day * (0.5 + sign * asked.peak / 2) for sign in (-1, 1))
    text = documents(api, first, last, load, scale, asked)
    reply = api.apply([operator_pb2.Document(name="daynight.yaml", text=text)])
    assert not reply.problems, reply.problems
    try:
        _until(lambda: _ready(api, "bound") and _ready(api, "moved"), started, "both workloads to serve")
        _until(lambda: _read(api, SERVER).power == "asleep", started, "the second server to sleep")
    except AssertionError:
        _print_events(api)
        raise
    time.sleep(max(0.0, started - _now()))
    watched = [WorkloadOutcomes("bound"), WorkloadOutcomes("moved")]
    meters = DeviceMeters(api, (BOUND, SERVER))
    with meters:
        send(client, watched, started, asked.day, lambda at: load.peak_rate if first <= at < last else load.night_rate)
        time.sleep(2 * METER_S)
    _print_events(api)
    day_s: float = asked.day
    end = started + day_s

    def watts(node: str, since: float, until: float) -> float:
        """The node's joules between the two times, over the whole day."""
        return (meters.joules(node, until) - meters.joules(node, since)) * scale / day_s

    def p95(in_peak: bool) -> dict[str, float]:
        return {each.name: each.p95(lambda at: (first <= at < last) == in_peak, scale) for each in watched}

    rest, board_w = devices[SERVER].device.rest, devices[BOARD].receipt.rates.active_w
    active_w = devices[SERVER].receipt.rates.active_w
    slept = meters.sleep_s(SERVER, started, end) / asked.day
    bound_w, server_w = watts(BOUND, started, end), watts(SERVER, started, end)
    in_peak_w = watts(SERVER, first, last)
    # The peak is the same requests on the same device for `bound`'s server, without the cost of migrating.
    waking_w = active_w * rest.wake_s / asked.day
    limit_w = watts(BOUND, first, last) + rest.asleep_w * (1 - asked.peak) + waking_w + board_w
    sleeps = meters.sleep_states(SERVER)
    return DayReport(
        device=asked.board,
        day_s=asked.day,
        compressed=DAY_S / asked.day,
        time_scale=scale,
        peak_share=asked.peak,
        load=load,
        wake_s=rest.wake_s,
        requests={each.name: len(each.outcomes) for each in watched},
        failed={each.name: len(each.outcomes) - each.count("ok", "wrong") for each in watched},
        wrong={each.name: each.count("wrong") for each in watched},
        p95_night_s=p95(False),
        p95_peak_s=p95(True),
        bound_w=bound_w,
        server_w=server_w,
        server_asleep_w=slept * rest.asleep_w,
        server_peak_w=in_peak_w,
        server_else_w=server_w - in_peak_w - slept * rest.asleep_w,
        board_w=board_w,
        moved_w=server_w + board_w,
        limit_w=limit_w,
        saved=1 - (server_w + board_w) / bound_w,
        limit=1 - limit_w / bound_w,
        saved_if_asleep_drew_idle=1 - (server_w + board_w + slept * (rest.idle_w - rest.asleep_w)) / bound_w,
        asleep_share=slept,
        awake_before_s=first - max((at for at, is_so in sleeps if is_so and at < first), default=started),
        awake_after_s=min((at for at, is_so in sleeps if is_so and at > last), default=end) - last,
        moves=[_format_move(each, started) for each in sorted(api.get("migrations").migrations, key=_start_of)],
    )


def plan_load(devices: dict[str, operator_pb2.DeviceView], scale: float, asked: argparse.Namespace) -> DayLoad:
    """The load that was asked for, given what paces the devices."""
    side = round(math.sqrt(MODEL_FLOPS / flops(1)))
    server_s, board_s = (device_seconds(devices[name].device.profile, side) for name in (SERVER, BOARD))
    peak = asked.peak_load / server_s
    night = peak * asked.night
    return DayLoad(
        side, night / scale, peak / scale, asked.peak_load, night * board_s, peak * board_s, SLO_TIMES * board_s
    )


def device_seconds(profile: str, side: int) -> float:
    """Of one answer on a device of that profile."""
    pace = pace_of(load_profile(profile), Bytes(0))
    work = Work(conv_flops=flops(side), nodes=2)
    return model_pace(pace, work, 2 * 9 * CHANNELS**2, "fp32").seconds()


def documents(
    api: RegionClient, first: float, last: float, load: DayLoad, scale: float, asked: argparse.Namespace
) -> str:
    """Rates and latencies in documents are in the devices' own time; seconds of migrations are not."""
    region = api.get("nodes").nodes[0].node.region
    at_peak = f"int(now) >= {first:.0f} && int(now) < {last:.0f}"
    rates = f"rate: {load.night_rate * scale:g}/s, peak: {load.peak_rate * scale:g}/s"
    traffic = f"{{from: {region}, {rates}, when: '{at_peak}'}}"
    slo = f"latency: {{p95: {load.slo_own_s * 1e6:.0f}us}}"
    cooldown = max(1.0, COOLDOWN_S * asked.day / DAY_S)
    when = f"{{gain: 5%, cooldown: {cooldown:.0f}s}}"
    return f"""apiVersion: shoal/v1
kind: Region
metadata: {{name: {region}}}
spec: {{sleep: {{after: 1s}}}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {{name: bound}}
spec:
  require: {{{slo}, where: node.name == "{BOUND}"}}
  optimize: {{latency: 1}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {{name: moved}}
spec:
  require: {{{slo}, where: 'node.name in ["{SERVER}", "{BOARD}"]'}}
  optimize: {{energy: 1}}
  migration: {{when: {when}, shift: {{steps: [50%, 100%], hold: 2s}}, drain: 10s}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: bound}}
spec: {{model: {{source: convolutions}}, policy: bound, traffic: [{traffic}]}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: moved}}
spec: {{model: {{source: convolutions}}, policy: moved, traffic: [{traffic}]}}
"""


def send(
    client: Context, watched: Sequence[WorkloadOutcomes], started: float, day_s: float, rate: Callable[[float], float]
) -> None:  # fmt: skip
    """Open loop: each request is sent when it is due, whatever became of earlier ones, and its latency counts from
    then."""
    local = threading.local()
    image = np.linspace(-1, 1, CHANNELS, dtype=np.float32).reshape(1, CHANNELS, 1, 1)

    def one(each: WorkloadOutcomes, at: float) -> None:
        if not hasattr(local, "client"):
            local.client = InferenceClient(client, retries=0)
        code = "ok"
        try:
            answer = local.client.infer(each.name, {"x": image}, deadline_s=60.0)
            if not np.allclose(answer.outputs["y"], image, atol=TOLERANCE):
                code = "wrong"
        except ShoalError as error:
            code = str(error.code)
        each.outcomes.append((at, _now() - at, code))

    with ThreadPoolExecutor(CLIENTS) as pool:
        due = started
        while due < started + day_s:
            time.sleep(max(0.0, due - _now()))
            for each in watched:
                pool.submit(one, each, due)
            due += 1 / rate(due)


class DeviceMeters:
    """The devices' own readings, polled while the block runs."""

    def __init__(self, api: RegionClient, nodes: Sequence[str]) -> None:
        self._api = api
        self._read: dict[str, list[nouns_pb2.Reading]] = {name: [] for name in nodes}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "DeviceMeters":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def joules(self, node: str, at: float) -> float:
        return self._at(node, at, lambda each: each.energy_j)

    def sleep_s(self, node: str, since: float, until: float) -> float:
        slept = [self._at(node, at, lambda each: each.slept_s) for at in (since, until)]
        return slept[1] - slept[0]

    def sleep_states(self, node: str) -> list[tuple[float, bool]]:
        return [(each.taken_at, each.power == "asleep") for each in self._read[node]]

    def _at(self, node: str, at: float, figure: Callable[[nouns_pb2.Reading], float]) -> float:
        known = self._read[node]
        return float(np.interp(at, [each.taken_at for each in known], [figure(each) for each in known]))

    def _poll(self) -> None:
        while True:
            for row in self._api.get("devices").devices:
                if row.node in self._read:
                    self._read[row.node].append(row.reading)
            if self._over.wait(METER_S):
                return


def flops(side: int) -> float:
    """Floating-point operations of two convolutions of 3 x 3."""
    return 2 * 2.0 * 9 * CHANNELS**2 * side**2


def convolutions(side: int) -> bytes:
    """y = x through two 3 x 3 convolutions with identity kernels over CHANNELS x side x side."""
    kernel = np.zeros((CHANNELS, CHANNELS, 3, 3), np.float32)
    kernel[:, :, 1, 1] = np.eye(CHANNELS, dtype=np.float32)
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["wide"]),
        helper.make_node("Conv", ["wide", "kernel"], ["once"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["once", "kernel"], ["twice"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["twice"], ["y"]),
    ]
    shape = [1, CHANNELS, 1, 1]
    graph = helper.make_graph(
        nodes, "convolutions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(kernel, "kernel"),
         numpy_helper.from_array(np.array([1, 1, side, side], np.int64), "times")],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return bytes(made.SerializeToString())


def show(report: DayReport) -> None:
    load = report.load
    print(f"EMULATED devices (two servers with an NVIDIA L4, {report.device}); real processes, requests and moves")
    print(
        f"24 h in {report.day_s:.0f} s (1/{report.compressed:.0f}): the peak ({report.peak_share:.0%} of the day), a "
        f"server's waking (260 s, assumed: {report.wake_s:.2f} s here), cooldown. Not compressed: holding, loading, "
        "comparing, shifting, draining"
    )
    print(f"model: two convolutions over {CHANNELS} x {load.side} x {load.side}, {flops(load.side) / 1e9:.2f} GFLOP")
    print(f"time scale {report.time_scale:g}: devices answer so many times slower; below is their own time")
    print(
        f"load: at the peak {load.peak_rate:.1f} requests/s here, {load.peak_of_server:.0%} of a server's time and "
        f"{load.peak_of_board:.0%} of the board's; else {load.night_rate:.1f}/s, {load.night_of_board:.0%} of that"
    )
    heads = f"{'p95 night':>11} {'p95 peak':>11} {'SLO':>10} {'watts':>9}"
    print(f"{'':8} {'requests':>9} {'failed':>7} {'wrong':>6} {heads}")
    for name, watts in (("bound", report.bound_w), ("moved", report.moved_w)):
        print(
            f"{name:8} {report.requests[name]:9} {report.failed[name]:7} {report.wrong[name]:6} "
            f"{report.p95_night_s[name] * 1e3:8.3f} ms {report.p95_peak_s[name] * 1e3:8.3f} ms "
            f"{load.slo_own_s * 1e3:7.3f} ms {watts:7.1f} W"
        )
    print(
        f"moved: server {report.server_w:.1f} W = {report.server_asleep_w:.1f} asleep + {report.server_peak_w:.1f} in "
        f"the peak + {report.server_else_w:.1f} waking, moving and waiting; board {report.board_w:.1f} W, as if "
        "at work all day"
    )
    print(
        f"server asleep {report.asleep_share:.0%} of the day; awake {report.awake_before_s:.0f} s before the peak and "
        f"{report.awake_after_s:.0f} s after it"
    )
    p95s = [figure for each in (report.p95_night_s, report.p95_peak_s) for figure in each.values()]
    held = "held" if all(figure <= load.slo_own_s for figure in p95s) else "NOT held: these watts say nothing"
    print(
        f"saved: {report.saved:.1%} of static binding; SLO {held}. limit {report.limit:.1%}: server awake for peak "
        f"and to wake alone. {report.saved_if_asleep_drew_idle:.1%} if asleep drew as much as idle"
    )
    for move in report.moves:
        print(f"  {move}")


def _format_move(move: operator_pb2.MigrationView, started: float) -> str:
    stages = ", ".join(f"{each.stage} {each.at - started:.0f}" for each in move.stages)
    return f"{move.cause}: {move.source.node} -> {move.target.node} (s of the day: {stages}); {move.why}"


def _start_of(move: operator_pb2.MigrationView) -> float:
    return move.stages[0].at


def _ready(api: RegionClient, name: str) -> bool:
    return any(row.workload.name == name and row.ready >= 1 for row in api.get("workloads").workloads)


def _read(api: RegionClient, node: str) -> nouns_pb2.Reading:
    return next(row.reading for row in api.get("devices").devices if row.node == node)


def _until(holds: Callable[[], bool], end: float, what: str) -> None:
    while not holds():
        assert _now() < end, f"waited {SETTLE_S:.0f} s for {what}"
        time.sleep(0.2)


def _print_events(api: RegionClient) -> None:
    for event in api.events(0):
        _log(f"{event.code} {event.subject} {event.message}")


def _log(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def _now() -> float:
    return time.time()


if __name__ == "__main__":
    main()
