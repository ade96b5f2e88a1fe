"""How well latencies and moves are predicted: `shoal bench prediction --live`, `--moves` or `--published`.

`--live`: models from wheels and models built in code (`_prediction/live_models.py`) are loaded and warmed up by real
workers on each provider of this machine's processor, at several batches and threads. Latency is predicted twice. Tier
a knows the case's own first warm-up and predicts those of later rounds. Tier b knows the device's receipt and the first
warm-ups of all other model families. Memory and load time are those of tier b. `--busy` keeps every core busy.
The last line is one JSON object: MAPE in %, shares of 1, the median high over low of tier b (width), and by how many %
the memory of the worst case was predicted too low. p95 is that of tier b, as memory and load are. Loads are judged by
the clock and, since other programs make them wait, by processor time (cpu). On a machine that is never idle,
`--fastest` takes of each case the fastest warm-up of the first half of the rounds, which is known, and that of the
second half, which judges both tiers: six rounds or more.

`--moves`: in a region of three agents on this machine, models move between two nodes, and to a third one that their
policy forbids. Before each move can-move is asked. Compared are the verdict with what came of the move, and the seconds
that the migration expected with those that it took. The last line is one JSON object: moves tried and done, the share
of right verdicts, the share of durations within 30 %, and their median error in %.

`--published`: each device of published tables is taken as new: k of its models are measured, the others are predicted
from what other devices took. Beside it in the same run, on the same models: ridge regression, the nearest device, and a
roofline where the source tells operations. `chosen`: the k models are those that Shoal asks for, otherwise they are
drawn.

Tables: Qualcomm AI Hub (real models, ONNX Runtime on NPUs; k = 0, 5, 10, 30), NAS-Bench-201 and FBNet (k = 10, 50,
200). `--device FILE` takes a CSV with the columns of one of them and judges the devices in it, which are in none.

The last line is one JSON object: for each table and k the means over devices of the MAPE %, the share inside the 90 %
interval (coverage) and its median high over low (width).
"""

import argparse
import asyncio
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from _machine import machine_line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from _prediction.live import CaseChoice, LiveErrors, LiveMeasured, again, fastest_alone, live_errors, measure_all
from _prediction.live import summary as live_summary
from _prediction.live_models import MODELS
from _prediction.moves import MoveTrial, move_trials
from _prediction.moves import summary as moves_summary
from _prediction.published import DeviceErrors, device_errors, leave_one_out, summary
from _prediction.tables import published_tables, read_unseen

DATA = Path(__file__).parents[2] / "shared" / "data"
MOVED = ("resnet", "mobilenet", "bert", "perceptron")
HEAD = f"{'table':18} {'device':24} {'k':>3} {'MAPE %':>7} {'chosen':>7} {'ridge':>7} {'(table)':>7} {'nearest':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--live", action="store_true", help="this machine's own workers")
    kinds.add_argument("--moves", type=int, metavar="COUNT", help="so many moves of real workers")
    kinds.add_argument("--published", action="store_true", help="transfer on published latencies")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further live case or move after so many")
    parser.add_argument("--rounds", type=int, default=3, help="warm-ups of each live case; the first one is known")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="live models to take (none: all)")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2], help="intra-op threads of a run")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--busy", action="store_true", help="keep every core busy while measuring")
    parser.add_argument("--simulate", nargs="*", default=[], help="vendors' simulators, such as htp, for the processor")
    parser.add_argument("--devices", nargs="*", default=[], help="names of devices, such as gpu0, for the processor")
    parser.add_argument("--raw", type=Path, help="write what was measured to this file")
    parser.add_argument("--from", dest="measured", type=Path, help="judge what such a file says, and measure nothing")
    parser.add_argument("--fastest", action="store_true", help="of each half of a live case's rounds take the fastest")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published tables")
    parser.add_argument("--device", type=Path, help="CSV of a device that is in no table")
    parser.add_argument("--runtimes", nargs="*", default=["onnx"], help="of AI Hub (none: all)")
    parser.add_argument("--all", action="store_true", help="every device of the architecture tables, not six")
    parser.add_argument("--draws", type=int, default=20, help="random choices of the measured models")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine_line())
    if options.live:
        _live(options)
        return
    if options.moves is not None:
        _moves(options)
        return
    print(f"{HEAD} {'roofline':>8} {'covered':>8} {'width':>6}")
    print(json.dumps(summary(list(_printed(_errors(options))))))


def _live(options: argparse.Namespace) -> None:
    found = again(options.measured) if options.measured else _measure(options)
    receipts, measured = fastest_alone(found) if options.fastest else found
    errors = live_errors(receipts, measured)
    loads = f"{'MB':>6} {'b':>6} {'load':>7} {'b':>6} {'cpu':>7} {'b':>6}"
    print(f"{'case':34} {'ms':>9} {'a':>6} {'b':>6} {'b interval':>13} {loads}  basis")
    for each in sorted(errors, key=lambda each: each.case.name):
        print(_row(each))
    print(json.dumps(live_summary(errors)))


def _measure(options: argparse.Namespace) -> LiveMeasured:
    models = [MODELS[name]() for name in options.models or MODELS]
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_cores(options))]
    try:
        found = asyncio.run(measure_all(models, _choice(options), options.rounds, options.seed, options.seconds))
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    if options.raw:
        options.raw.write_bytes(pickle.dumps(found))
    return found


def _moves(options: argparse.Namespace) -> None:
    models = [MODELS[name]() for name in options.models or MOVED]
    trials = list[MoveTrial]()
    print(f"{'workload':18} {'to':8} {'can-move':9} {'expected s':>10} {'took s':>7}  stages, or why not")
    with tempfile.TemporaryDirectory(prefix="shoal-moves-") as folder:
        for each in move_trials(Path(folder), models, options.moves, options.seconds, options.seed):
            trials.append(each)
            found = each.code or ", ".join(f"{stage} {took:.1f}" for stage, took in each.stages)
            seconds = f"{each.expected_s:10.1f} {each.took_s:7.1f}"
            print(f"{each.workload:18} {each.target:8} {each.answer:9} {seconds}  {found}", flush=True)
    print(json.dumps(moves_summary(trials)))


def _choice(options: argparse.Namespace) -> CaseChoice:
    return CaseChoice(
        tuple(options.threads),
        tuple(options.batches),
        simulate=tuple(options.simulate),
        devices=tuple(options.devices),
    )


def _cores(options: argparse.Namespace) -> int:
    return len(os.sched_getaffinity(0)) if options.busy else 0


def _row(each: LiveErrors) -> str:
    """Latency, memory and load as measured; predictions as shares of these."""
    a, b, seen = each.known, each.calibrated, each.measured
    low, _, high = (value / each.later_s for value in b.latency_p50_s)
    return (
        f"{each.case.name:34} {1e3 * each.later_s:9.3f} {a.latency_p50_s.mid / each.later_s:6.2f} "
        f"{b.latency_p50_s.mid / each.later_s:6.2f} {low:6.2f} {high:6.2f} {seen.memory_bytes / 2**20:6.1f} "
        f"{b.memory_bytes.mid / seen.memory_bytes:6.2f} {seen.load_s:7.3f} {b.load_s.mid / seen.load_s:6.2f} "
        f"{seen.load_cpu_s:7.3f} {_load_share(each):6.2f}  {b.basis}"
    )


def _load_share(each: LiveErrors) -> float:
    """Predicted over measured processor time of the load; NaN where one is unknown."""
    known, measured = each.load_cpu_s, each.measured.load_cpu_s
    return math.nan if known is None or measured <= 0 else known.mid / measured


def _errors(options: argparse.Namespace) -> Iterable[DeviceErrors]:
    if options.device:
        for device in read_unseen(options.device, options.data):
            known = device.table.known.without(device.name)
            yield from device_errors(device, known, options.draws, options.seed)
    else:
        tables = published_tables(options.data, options.runtimes)
        yield from leave_one_out(tables, options.draws, options.all, options.seed)


def _printed(errors: Iterable[DeviceErrors]) -> Iterable[DeviceErrors]:
    for each in errors:
        print(
            f"{each.table:18} {each.device:24} {each.measured:3} {each.mape:7.2f} {each.mape_chosen:7.2f} "
            f"{each.ridge:7.2f} {each.ridge_table:7.1f} {each.nearest:8.2f} {each.roofline:8.2f} "
            f"{each.coverage:8.3f} {each.width:6.2f}",
            flush=True,
        )
        yield each


if __name__ == "__main__":
    main()
