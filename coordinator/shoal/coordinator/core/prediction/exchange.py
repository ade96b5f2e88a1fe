"""Measurements from one region to another: a document of what one learnt, and what another believes of it.

A row is all that a region knows of one model on one device class, as medians: no node, no tenant and no workload is
named. It is checked as a stranger's words are (docs/guides/prediction.md, docs/decisions/0047).
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from statistics import median
from typing import Any, Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.fleet.checks import LATEST_TIME, MOST_COUNT, MOST_SECONDS
from shoal.coordinator.core.prediction.demand import OperatorClass
from shoal.coordinator.core.prediction.load_law import LoadSizes
from shoal.coordinator.core.prediction.region_residuals import MOST_RESIDUALS
from shoal.coordinator.core.prediction.residuals import MOST_RATIO, DeviceClass, Residual
from shoal.coordinator.core.prediction.tails import log_tail
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import NAME_PATTERN
from shoal.types.profile import PROFILE_VERSION
from shoal.types.units import Wall

API_VERSION: Final = "shoal/v1"
KIND: Final = "Measurements"
MOST_ROWS: Final = MOST_RESIDUALS
"""Of one region: as many pairs as it learns from itself."""
MOST_REGIONS: Final = 16
"""Whose measurements are kept: then there are as many rows as warm-ups (`MOST_WARM_UPS`)."""
MOST_DOCUMENT_BYTES: Final = 2**20
"""Three times what `MOST_ROWS` rows take that have every field (1.4 KB each)."""
_SHOWN_LEFT_OUT: Final = 20
"""Rows that are left out of which the reason is told; the others are counted. A choice, for a terminal."""
_DIGITS: Final = 9
"""Of a figure, so that what rounding changes of a prediction is far below what it shows. A choice."""
_LAUNCH: Final = "launch"
_OPERATORS: Final = (_LAUNCH, *(each.value for each in OperatorClass))
"""Names of the shares of `Residual.mix`, in its order."""
_MODEL: Final = re.compile(r"sha256:[0-9a-f]{64}(?:\+[a-z0-9]{1,16})?")
"""A digest, and the precision in which a node prepared it (`variant_of`)."""
_MOST_NAME: Final = 200
"""Characters of a provider or a product. The longest of the device profiles in `agents/` has 40."""
_SUM: Final = 0.01
"""By which shares may miss 1: fifteen of them, each rounded."""


@dataclass(frozen=True, slots=True)
class ImportedMeasurements:
    """What one other region measured."""

    # The region that exported it.
    region: str
    # When it did.
    exported_at: Wall
    # When it was imported here.
    imported_at: Wall
    # The operator who did.
    actor: str
    # One for each model and device class.
    rows: tuple[Residual, ...]

    @property
    def models(self) -> int:
        return len({each.model for each in self.rows})

    @property
    def classes(self) -> int:
        return len({each.device_class for each in self.rows})


class ReadMeasurements(NamedTuple):
    """A document as far as it is believed."""

    # The region that exported it.
    region: str
    # When it did.
    exported_at: Wall
    # One for each model and device class.
    rows: tuple[Residual, ...]
    # Number of further ones, which are not believed.
    left_out: int = 0
    # Why the first of these are not.
    reasons: tuple[Refusal, ...] = ()


def measurements_document(region: str, wall: Wall, residuals: Iterable[Residual]) -> bytes:
    """What the region measured itself, as JSON: at most `MOST_ROWS` rows, those that it learns from.

    residuals: in the order in which the region learns from them.
    """
    groups = defaultdict[tuple[str, DeviceClass], list[Residual]](list)
    for each in residuals:
        if each.is_plausible and each.is_of_sum and not each.imported_from:
            groups[each.model, each.device_class].append(each)
    rows = [_as_row(groups[key]) for key in sorted(groups)[:MOST_ROWS]]
    at = datetime.fromtimestamp(int(wall), UTC).isoformat().replace("+00:00", "Z")
    document = {"apiVersion": API_VERSION, "kind": KIND, "region": region, "exportedAt": at, "rows": rows}
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def read_measurements(data: bytes) -> ReadMeasurements:
    """The rows of a document that can be. A row that cannot is left out, with its reason.

    Raises ShoalError(TOO_LARGE | FIELD_INVALID | FIELD_MISSING | API_VERSION_UNKNOWN | KIND_UNKNOWN | NAME_INVALID |
    FIELD_TOO_MANY), and TELEMETRY_ABSURD where it has rows and none of them can be.
    """
    found = _envelope(data)
    region, rows = found["region"], found["rows"]
    known, reasons, left_out = dict[tuple[str, DeviceClass], Residual](), list[Refusal](), 0
    for number, row in enumerate(rows):
        try:
            residual = _from_row(row, region)
            if (key := (residual.model, residual.device_class)) in known:
                raise _Doubt("a second row of this model and device", "one")
        except _Doubt as doubt:
            left_out += 1
            if len(reasons) < _SHOWN_LEFT_OUT:
                reasons.append(doubt.refusal(number))
        else:
            known[key] = residual
    if rows and not known:
        raise ShoalError(reasons[0])
    return ReadMeasurements(region, _time(found["exportedAt"]), tuple(known.values()), left_out, tuple(reasons))


def with_imported(own: Map[Any, Residual], imported: Map[str, ImportedMeasurements]) -> Map[Any, Residual]:
    """What the region measured and what it imported, by any key. The same object for the same arguments, as far as
    these are remembered."""
    return _joined(own, imported) if imported else own


@lru_cache(maxsize=8)
def _joined(own: Map[Any, Residual], imported: Map[str, ImportedMeasurements]) -> Map[Any, Residual]:
    rows = {(region, each.model, *each.device_class): each for region in imported for each in imported[region].rows}
    return own.update(rows)


class _Doubt(Exception):
    """Why a row is not believed."""

    def __init__(self, found: str, asked: str, code: Code = Code.TELEMETRY_ABSURD) -> None:
        super().__init__(found)
        self._found, self._asked, self._code = found, asked, code

    def refusal(self, number: int) -> Refusal:
        remedy = "ask the region that exported it; the other rows count"
        return Refusal(self._code, f"rows[{number}]: {self._found}", self._asked, remedy)


def _as_row(rows: Sequence[Residual]) -> dict[str, object]:
    """rows: of one model and class, at least one, each a residual of sums."""
    first = rows[0]
    logs = [each.log_ratio_of_sum for each in rows]
    middle = median(logs)
    tails = [each for each in rows if math.isfinite(each.log_tail)]
    found: dict[str, object] = {
        "model": first.model,
        "provider": first.device_class.provider,
        "product": first.device_class.product,
        "profileVersion": first.profile_version,
        "measurements": len(rows),
        "ratio": _rounded(math.exp(middle)),
        "spread": _rounded(math.exp(median(abs(each - middle) for each in logs))),
        "operators": {name: _rounded(share) for name, share in zip(_OPERATORS, first.mix, strict=True) if share > 0},
    }
    if tails:
        found["tail"] = _rounded(math.exp(math.exp(median(each.log_tail for each in tails))))
        found["tailRuns"] = sum(each.tail_runs for each in tails)
    loads = [each for each in rows if each.load_sizes is not None]
    if loads:
        # Others were loaded at other shapes.
        same = [each for each in loads if each.load_sizes == loads[0].load_sizes]
        found["load"] = {
            "sizes": _sizes_row(loads[0].load_sizes),
            "memorySizes": _sizes_row(loads[0].memory_sizes),
            "memoryBytes": _known_median(each.memory_bytes for each in same),
            "providerBytes": _known_median(each.provider_bytes for each in same),
            "seconds": _known_median(each.load_s for each in same),
            "cpuSeconds": _known_median(each.load_cpu_s for each in same),
        }
    return found


def _from_row(row: object, region: str) -> Residual:
    """Raises _Doubt."""
    if not isinstance(row, dict):
        raise _Doubt("no object", "an object")
    model = _text(row, "model")
    if _MODEL.fullmatch(model) is None:
        raise _Doubt(f"model {model!r:.80}", "sha256:<64 hex digits>, and +<precision> where it was prepared")
    version = _count(row, "profileVersion", 2**31)
    if version > PROFILE_VERSION:
        asked = f"at most {PROFILE_VERSION}, that of this coordinator"
        raise _Doubt(f"profileVersion {version}", asked, Code.NOT_SUPPORTED_YET)
    tail = _figure(row, "tail", 1.0, MOST_RATIO)
    load = row.get("load") or {}
    if not isinstance(load, dict):
        raise _Doubt("load is no object", "an object")
    sizes, tail_runs = _sizes(load, "sizes"), _count(row, "tailRuns", MOST_COUNT)
    known = math.nan if math.isnan(tail) else log_tail(1.0, tail)
    return Residual(
        model,
        DeviceClass(_text(row, "provider"), _text(row, "product")),
        _mix(row.get("operators")),
        math.nan,
        load_sizes=sizes,
        memory_bytes=_figure(load, "memoryBytes", 1.0, MOST_COUNT),
        load_s=_figure(load, "seconds", 1e-9, MOST_SECONDS),
        log_tail=known,
        tail_runs=0 if math.isnan(known) else tail_runs,
        load_cpu_s=_or_zero(_figure(load, "cpuSeconds", 0.0, MOST_SECONDS)),
        memory_sizes=None if sizes is None else _sizes(load, "memorySizes"),
        log_ratio_of_sum=math.log(_figure(row, "ratio", 1 / MOST_RATIO, MOST_RATIO, is_required=True)),
        profile_version=version,
        provider_bytes=_or_zero(_figure(load, "providerBytes", 0.0, MOST_COUNT)),
        imported_from=region,
    )


def _envelope(data: bytes) -> Mapping[str, Any]:
    """All but the rows is checked. Raises ShoalError."""
    remedy = "see `shoal region measurements export`"
    if len(data) > MOST_DOCUMENT_BYTES:
        raise refuse(Code.TOO_LARGE, f"{len(data)} bytes", f"at most {MOST_DOCUMENT_BYTES}", remedy)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise refuse(Code.FIELD_INVALID, "a file that is no JSON", f"{KIND} as JSON in UTF-8", remedy) from cause
    if not isinstance(found, dict):
        raise refuse(Code.FIELD_INVALID, "JSON that is no object", f"{KIND} as an object", remedy)
    for name, wanted, code in (
        ("apiVersion", API_VERSION, Code.API_VERSION_UNKNOWN),
        ("kind", KIND, Code.KIND_UNKNOWN),
    ):
        if name not in found:
            raise refuse(Code.FIELD_MISSING, f"no {name}", wanted, remedy)
        if found[name] != wanted:
            raise refuse(code, f"{name} {_shown(found[name])}", wanted, remedy)
    for name, kind, asked in (
        ("region", str, "a region's name"),
        ("exportedAt", str, "a time"),
        ("rows", list, "rows"),
    ):
        if not isinstance(found.get(name), kind):
            code = Code.FIELD_INVALID if name in found else Code.FIELD_MISSING
            raise refuse(code, f"{name} {_shown(found.get(name))}", asked, remedy)
    if NAME_PATTERN.fullmatch(found["region"]) is None:
        raise refuse(Code.NAME_INVALID, f"region {found['region']!r:.80}", "lower case, digits and dashes", remedy)
    if len(found["rows"]) > MOST_ROWS:
        raise refuse(Code.FIELD_TOO_MANY, f"{len(found['rows'])} rows", f"at most {MOST_ROWS}", remedy)
    _time(found["exportedAt"])
    return found


def _time(text: str) -> Wall:
    """Raises ShoalError(FIELD_INVALID)."""
    try:
        at = datetime.fromisoformat(text[:40])
        seconds = at.timestamp() if at.tzinfo is not None else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= LATEST_TIME:
        raise refuse(Code.FIELD_INVALID, f"exportedAt {text!r:.80}", "as 2027-01-31T12:00:00Z", "export it again")
    return Wall(seconds)


def _mix(shares: object) -> tuple[float, ...]:
    if not isinstance(shares, dict):
        raise _Doubt("no operators", "shares of the seconds, by kind of operator")
    if unknown := sorted(str(each) for each in shares if each not in _OPERATORS):
        raise _Doubt(f"operators {unknown[0]!r:.40}", "kinds that this coordinator knows", Code.NOT_SUPPORTED_YET)
    mix = tuple(_or_zero(_figure(shares, name, 0.0, 1.0)) for name in _OPERATORS)
    if abs(math.fsum(mix) - 1) > _SUM:
        raise _Doubt(f"operators that add up to {math.fsum(mix):g}", "1")
    return mix


def _sizes_row(sizes: LoadSizes | None) -> dict[str, float] | None:
    return None if sizes is None else {name: _rounded(each) for name, each in sizes._asdict().items() if each}


def _sizes(load: Mapping[str, object], name: str) -> LoadSizes | None:
    sizes = load.get(name)
    if sizes is None:
        return None
    if not isinstance(sizes, dict):
        raise _Doubt(f"load.{name} is no object", "an object")
    if unknown := sorted(str(each) for each in sizes if each not in LoadSizes._fields):
        raise _Doubt(f"load.{name} {unknown[0]!r:.40}", "sizes that this coordinator knows", Code.NOT_SUPPORTED_YET)
    return LoadSizes(*(_or_zero(_figure(sizes, each, 0.0, MOST_COUNT)) for each in LoadSizes._fields))


def _text(row: Mapping[str, object], name: str) -> str:
    text = row.get(name)
    if not (isinstance(text, str) and 0 < len(text) <= _MOST_NAME and text.isprintable()):
        raise _Doubt(f"{name} {_shown(text)}", f"1 to {_MOST_NAME} printable characters")
    return text


def _count(row: Mapping[str, object], name: str, most: int) -> int:
    """0 where it is missing."""
    value = row.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _Doubt(f"{name} {_shown(value)}", f"a whole number of 0 to {most}")
    return value


def _figure(row: Mapping[str, object], name: str, least: float, most: float, *, is_required: bool = False) -> float:
    """NaN where it is missing."""
    value = row.get(name)
    if value is None and not is_required:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _Doubt(f"{name} {_shown(value)}", f"{least:g} to {most:g}")
    return float(value)


def _shown(value: object) -> str:
    """Neither an integer of thousands of digits nor lists inside of lists are written out."""
    if isinstance(value, int) and abs(value) > MOST_COUNT:
        return "of more digits than it can have"
    if isinstance(value, dict | list):
        return "with an object" if isinstance(value, dict) else "with a list"
    return "missing" if value is None else f"{value!r:.80}"


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _known_median(values: Iterable[float]) -> float | None:
    """Of those that are known: finite and above 0."""
    known = [each for each in values if 0 < each < math.inf]
    return _rounded(median(known)) if known else None
