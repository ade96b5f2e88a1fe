"""How well latencies are predicted: `shoal bench prediction --published`.

Each device of published tables is taken as new: k of its models are measured, the others are predicted from what other
devices took. Beside it in the same run, on the same models: ridge regression, the nearest device, and a roofline where
the source tells operations. `chosen`: the k models are those that Shoal asks for, otherwise they are drawn.

Tables: Qualcomm AI Hub (real models, ONNX Runtime on NPUs; k = 0, 5, 10, 30), NAS-Bench-201 and FBNet (k = 10, 50,
200). `--device FILE` takes a CSV with the columns of one of them and judges the devices in it, which are in none.

The last line is one JSON object: for each table and k the means over devices of the MAPE %, the share inside the 90 %
interval (coverage) and its median high over low (width).
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from _machine import machine_line
from _prediction.published import DeviceErrors, device_errors, leave_one_out, summary
from _prediction.tables import published_tables, read_unseen

DATA = Path(__file__).parents[2] / "shared" / "data"
HEAD = f"{'table':18} {'device':24} {'k':>3} {'MAPE %':>7} {'chosen':>7} {'ridge':>7} {'(table)':>7} {'nearest':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", required=True, help="transfer on published latencies")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the published tables")
    parser.add_argument("--device", type=Path, help="CSV of a device that is in no table")
    parser.add_argument("--runtimes", nargs="*", default=["onnx"], help="of AI Hub (none: all)")
    parser.add_argument("--all", action="store_true", help="every device of the architecture tables, not six")
    parser.add_argument("--draws", type=int, default=20, help="random choices of the measured models")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine_line())
    print(f"{HEAD} {'roofline':>8} {'covered':>8} {'width':>6}")
    print(json.dumps(summary(list(_printed(_errors(options))))))


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
