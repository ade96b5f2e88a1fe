"""Published latencies as tables of models and devices, and the file of a device that is in none of them."""

import csv
import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from _prediction.architectures import Work, fbnet_features, fbnet_work, nasbench_features, nasbench_work

from shoal.coordinator.core.prediction.transfer.known import Floats, KnownLatencies
from shoal.types.codes import Code, refuse

HUB_FILE: Final = "qai_hub_latency.csv.gz"
NASBENCH_FILE: Final = "nasbench201_latency_27dev.csv.gz"
FBNET_FILE: Final = "fbnet_latency_27dev.csv.gz"
_FEWEST_DEVICES: Final = 3
"""Of a table of AI Hub: with fewer nothing can be left out and something be learnt from the rest."""
_MOST_ROWS, _MOST_COLUMNS = 200_000, 200
_SLOWEST_MS: Final = 3_600_000.0


@dataclass(frozen=True)
class PublishedTable:
    """Latencies of one source, by one runtime."""

    # As shown: the source, and the runtime and compute unit where it has several.
    name: str
    # How often models are measured on a new device.
    counts: tuple[int, ...]
    # Of all its devices.
    known: KnownLatencies
    # By row: the name of the model.
    models: tuple[str, ...]
    # By row: operations and bytes; None where the source does not tell them.
    work: Work | None


@dataclass(frozen=True)
class UnseenDevice:
    """Measurements of one device, of models of a table."""

    name: str
    table: PublishedTable
    # By row of the table: seconds; NaN where it was not measured.
    seconds: Floats


def published_tables(folder: Path, runtimes: Sequence[str]) -> list[PublishedTable]:
    """The three sources. runtimes: of AI Hub, those to take. Raises ShoalError(NOT_FOUND, FIELD_INVALID)."""
    hub = hub_tables(_hub_rows(folder / HUB_FILE), runtimes)
    return [*hub, *(_matrix_table(folder / name) for name in (NASBENCH_FILE, FBNET_FILE))]


def read_unseen(path: Path, folder: Path) -> list[UnseenDevice]:
    """The devices of a CSV with the columns of one of the sources. Raises ShoalError(NOT_FOUND, FIELD_INVALID).

    Rows of models that no known device ran are left out, and those without a positive number of milliseconds.
    """
    header, rows = _read(path)
    if header[:1] == ["arch"]:
        matrices = [_matrix_table(folder / name) for name in (NASBENCH_FILE, FBNET_FILE)]
        found = [_match_matrix(header, rows, table) for table in matrices]
    else:
        tables = hub_tables(_hub_rows(folder / HUB_FILE), ())
        found = [_match_hub(_as_hub_rows(path, header, rows), table) for table in tables]
    return [device for devices in found for device in devices]


@dataclass(frozen=True)
class _HubRow:
    """A latency that AI Hub publishes."""

    device: str
    # Runtime and compute unit, which make a table.
    table: tuple[str, str]
    # Name, component and precision.
    model: tuple[str, str, str]
    seconds: float


def hub_tables(rows: Iterable[_HubRow], runtimes: Sequence[str]) -> list[PublishedTable]:
    """One for each runtime and compute unit that enough devices have. runtimes: those to take, or empty: all."""
    by_table: dict[tuple[str, str], list[_HubRow]] = defaultdict(list)
    for row in rows:
        by_table[row.table].append(row)
    tables = []
    for (runtime, unit), group in sorted(by_table.items()):
        devices = sorted({row.device for row in group})
        if len(devices) >= _FEWEST_DEVICES and (not runtimes or runtime in runtimes):
            models = sorted({row.model for row in group})
            precisions = sorted({precision for *_, precision in models})
            features = np.array([[float(model[2] == each) for each in precisions] for model in models])
            known = KnownLatencies(tuple(devices), tuple(devices), np.log(_grid(group, models, devices)), features)
            names = tuple("/".join(model) for model in models)
            tables.append(PublishedTable(f"AI Hub {runtime} {unit}", (0, 5, 10, 30), known, names, None))
    return tables


def _grid(rows: Iterable[_HubRow], models: Sequence[tuple[str, str, str]], devices: Sequence[str]) -> Floats:
    """(models, devices): seconds, NaN in gaps."""
    model_at, device_at = ({each: at for at, each in enumerate(names)} for names in (models, devices))
    grid = np.full((len(models), len(devices)), math.nan)
    for row in rows:
        if row.model in model_at and row.device in device_at:
            grid[model_at[row.model], device_at[row.device]] = row.seconds
    return grid


def _hub_rows(path: Path) -> list[_HubRow]:
    return _as_hub_rows(path, *_read(path))


def _as_hub_rows(path: Path, header: list[str], rows: list[list[str]]) -> list[_HubRow]:
    needed = ("model", "component", "precision", "device", "runtime", "latency_ms", "compute_unit")
    missing = [name for name in needed if name not in header]
    if missing:
        raise refuse(Code.FIELD_INVALID, f"no column {missing[0]} in {path.name}", ", ".join(needed), "add it")
    taken = [[row[header.index(name)] for name in needed] for row in rows]
    return [
        _HubRow(device, (runtime, unit), (model, component, precision), seconds)
        for model, component, precision, device, runtime, latency, unit in taken
        if not math.isnan(seconds := _seconds(latency))
    ]


def _match_hub(rows: Sequence[_HubRow], table: PublishedTable) -> list[UnseenDevice]:
    mine = [row for row in rows if f"AI Hub {' '.join(row.table)}" == table.name]
    models = [_model_of(name) for name in table.models]
    return [
        UnseenDevice(device, table, _grid([row for row in mine if row.device == device], models, [device])[:, 0])
        for device in sorted({row.device for row in mine})
    ]


def _model_of(name: str) -> tuple[str, str, str]:
    model, component, precision = name.split("/")
    return model, component, precision


def _matrix_table(path: Path) -> PublishedTable:
    """A table with one row for each architecture and a column for each device."""
    header, rows = _read(path)
    archs = [row[0] for row in rows]
    seconds = np.array([[_seconds(cell) for cell in row[1:]] for row in rows])
    nasbench = archs[0].startswith("|")
    features = (nasbench_features if nasbench else fbnet_features)(archs)
    work = (nasbench_work if nasbench else fbnet_work)(archs)
    devices = tuple(header[1:])
    known = KnownLatencies(devices, tuple(_chip(name, devices) for name in devices), np.log(seconds), features)
    return PublishedTable("NAS-Bench-201" if nasbench else "FBNet", (10, 50, 200), known, tuple(archs), work)


def _chip(name: str, names: Sequence[str]) -> str:
    """The name without its batch, where the same chip stands in several columns: `titan_rtx` of `titan_rtx_32`."""
    chip, _, batch = name.rpartition("_")
    columns = Counter(each.rpartition("_")[0] for each in names if each.rpartition("_")[2].isdigit())
    return chip if batch.isdigit() and columns[chip] > 1 else name


def _match_matrix(header: list[str], rows: list[list[str]], table: PublishedTable) -> list[UnseenDevice]:
    at = {arch: number for number, arch in enumerate(table.models)}
    found = [(at[row[0]], row[1:]) for row in rows if row[0] in at]
    if not found:
        return []
    seconds = np.full((len(table.models), len(header) - 1), math.nan)
    for number, cells in found:
        seconds[number] = [_seconds(cell) for cell in cells]
    return [UnseenDevice(name, table, seconds[:, column]) for column, name in enumerate(header[1:])]


def _seconds(milliseconds: str) -> float:
    """NaN: no positive number of milliseconds, or more than an hour."""
    try:
        value = float(milliseconds)
    except ValueError:
        return math.nan
    return value / 1000 if 0 < value <= _SLOWEST_MS else math.nan


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows, all as long as the header. Raises ShoalError(NOT_FOUND, FIELD_INVALID)."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = [line for _, line in zip(range(_MOST_ROWS + 1), csv.reader(file), strict=False)]
    except OSError as error:
        raise refuse(Code.NOT_FOUND, f"{path.name}: {error}", "a file of published latencies", "--data") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise refuse(Code.FIELD_INVALID, f"{path.name}: {error}", "a CSV file", "see --help") from error
    if len(lines) < 2 or not 2 <= len(lines[0]) <= _MOST_COLUMNS:
        raise refuse(Code.FIELD_INVALID, f"{path.name}: {len(lines)} lines", "a header and rows", "see --help")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            found = f"{path.name}, line {number}: {len(line)} cells"
            raise refuse(Code.FIELD_INVALID, found, f"{len(lines[0])} cells", "correct the line")
    return lines[0], lines[1:]
