"""What a run measured, by case and server: medians of rounds, ratios, tables, and the last line. Pure."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from _serving.h2load import LoadSample
from _serving.models import CHARACTER, CLASSIFIER, CROP, LINE, MAGIKA, MB1, MB4, RECOGNISER, SMALL, TILE

FRONT: Final = "shoal front, TLS"
GATEWAY: Final = "shoal gateway, TLS"
ENVOY: Final = "envoy to shoal front, TLS"
TRITON: Final = "triton"
TRITON_TLS: Final = "triton, TLS"
ENVOY_TRITON: Final = "envoy to triton, TLS"
"""Envoy ends TLS before Triton's HTTP port, which has none."""
FLOOR: Final = "in process"
ROLES_OF_A_REQUEST: Final = ("front", "worker")

Reading = Callable[[LoadSample], float]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, and how."""

    # In tables; unique.
    name: str
    # Served model; empty: ServerReady.
    model: str
    # Requests in flight.
    in_flight: int
    # Connections that carry them, over HTTP/2.
    connections: int = 1
    # True: tensors as JSON over HTTP/1.1.
    is_json: bool = False
    # Who is asked; empty: all who can answer.
    only: frozenset[str] = frozenset()
    # Requests that another tenant, far beyond its quota, keeps in flight meanwhile.
    flood: int = 0
    # A round has at least so many requests, so that a p99 is one of several.
    least: int = 64

    @property
    def has_floor(self) -> bool:
        """Whether ONNX Runtime in process is measured beside it."""
        return bool(self.model) and not self.is_json and not self.flood and self.connections == 1


READY_16: Final = Case("ServerReady, 16 in flight", "", 16)
SMALL_1: Final = Case("small, 1 in flight", SMALL, 1)
SMALL_16: Final = Case("small, 16 in flight", SMALL, 16)
CLASSIFIER_16: Final = Case("classifier, 16 in flight", CLASSIFIER, 16)
MAGIKA_4: Final = Case("magika, 4 in flight", MAGIKA, 4)
MB1_1: Final = Case("1 MB in and out, 1 in flight", MB1, 1)
MB4_1: Final = Case("4 MB in and out, 1 in flight", MB4, 1)
SMALL_JSON: Final = Case("small as JSON, 16 in flight", SMALL, 16, is_json=True)
CLASSIFIER_JSON: Final = Case("classifier as JSON, 16 in flight", CLASSIFIER, 16, is_json=True)
CONNECTIONS: Final = Case(
    "small, 1000 connections", SMALL, 1000, 1000, only=frozenset((FRONT, TRITON_TLS)), least=10_000
)
SMALL_FLOOD: Final = Case("small, 1 in flight, beside a flood", SMALL, 1, only=frozenset((FRONT,)), flood=64, least=200)
ONE_CORE: Final = (
    READY_16, SMALL_1, SMALL_16, CLASSIFIER_16, MAGIKA_4, MB1_1, MB4_1, SMALL_JSON, CLASSIFIER_JSON, CONNECTIONS,
    SMALL_FLOOD,
)  # fmt: skip
"""Servers on one core, the client on the other."""
SMALL_2: Final = Case("small, 16 in flight, two cores", SMALL, 16)
CLASSIFIER_2: Final = Case("classifier, 16 in flight, two cores", CLASSIFIER, 16)
MAGIKA_2: Final = Case("magika, 16 in flight, two cores", MAGIKA, 16)
TWO_CORES: Final = (SMALL_2, CLASSIFIER_2, MAGIKA_2)
"""Servers and client on both cores; the cases of the floors come on top."""

FLOOR_CANDIDATES: Final = (CLASSIFIER, TILE, CROP, CHARACTER, MAGIKA, RECOGNISER, LINE)
"""Models of wheels, of which a run chooses those of the floors."""
FLOOR_RANGES: Final[Mapping[str, tuple[float, float]]] = {"floor_10ms": (0.010, math.inf), "floor_1ms": (0.001, 0.002)}
"""Seconds in process, from and to, of a model that a floor may be of."""


class FloorModel(NamedTuple):
    """The model of a floor, as it was chosen at the start of the run."""

    # In which it is measured.
    case: Case
    # Its run in process.
    seconds: float


def choose_floors(seconds: Mapping[str, float]) -> dict[str, FloorModel]:
    """Of each range that has candidates the shortest one, which a server adds most to. seconds: of a run in process, by
    candidate."""
    cases = {case.model: case for case in TWO_CORES}
    found = dict[str, FloorModel]()
    for key, (least_s, most_s) in FLOOR_RANGES.items():
        inside = {model: took for model, took in seconds.items() if least_s <= took <= most_s}
        if inside:
            model = min(inside, key=lambda each: inside[each])
            only = frozenset((FRONT, TRITON_TLS))
            case = cases.get(model) or Case(f"{model}, 16 in flight, two cores", model, 16, only=only)
            found[key] = FloorModel(case, inside[model])
    return found


def per_s(sample: LoadSample) -> float:
    return sample.per_s


def p50_s(sample: LoadSample) -> float:
    return sample.p50_s


def p99_s(sample: LoadSample) -> float:
    return sample.p99_s


def cpu_us(*roles: str) -> Reading:
    """CPU microseconds a request of processes in these roles. It raises MissingFigure where a role has none."""

    def read(sample: LoadSample) -> float:
        if absent := [role for role in roles if role not in sample.cpu_s]:
            raise MissingFigure(f"no process is a {absent[0]}: {', '.join(sample.cpu_s)}")
        return sum(sample.cpu_s[role] for role in roles) / sample.count * 1e6

    return read


class MissingFigure(Exception):
    """Something that this run did not measure, in words."""


@dataclass(slots=True)
class Figures:
    """rounds: samples by case and server, then by number of the round. others: what other benchmarks gave, by key.
    candidates: seconds of a run in process, by model of FLOOR_CANDIDATES."""

    rounds: dict[tuple[str, str], dict[int, LoadSample]] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    candidates: Mapping[str, float] = field(default_factory=dict)

    @property
    def two_cores(self) -> tuple[Case, ...]:
        """TWO_CORES, and the cases of the floors."""
        chosen = (floor.case for floor in choose_floors(self.candidates).values())
        return tuple(dict.fromkeys((*TWO_CORES, *chosen)))

    def add(self, case: Case, server: str, number: int, sample: LoadSample) -> None:
        self.rounds.setdefault((case.name, server), {})[number] = sample

    def samples(self, case: Case, server: str) -> dict[int, LoadSample]:
        """Raises MissingFigure."""
        if not (found := self.rounds.get((case.name, server))):
            raise MissingFigure(f"no figure of {server} in the case {case.name!r}")
        return found

    def median(self, case: Case, server: str, reading: Reading) -> float:
        """Raises MissingFigure."""
        return statistics.median(map(reading, self.samples(case, server).values()))

    def compare(
        self,
        these: tuple[Case, str],
        those: tuple[Case, str],
        reading: Reading,
        how: Callable[[float, float], float] = lambda this, that: this / that,
    ) -> float:
        """Median over the rounds that have both, each compared within its round. Raises MissingFigure."""
        ours, others = self.samples(*these), self.samples(*those)
        both = sorted(ours.keys() & others.keys())
        if not both:
            raise MissingFigure(f"no round has both {these[1]} and {those[1]} in the case {these[0].name!r}")
        return statistics.median(how(reading(ours[each]), reading(others[each])) for each in both)


Measure = Callable[[Figures], float]


class Key(NamedTuple):
    """A key of the last line."""

    # Its value. Raises MissingFigure.
    measure: Measure
    # What it compares.
    what: str
    # More of that, which only the run knows. Raises MissingFigure.
    more: Callable[[Figures], str] | None = None


def _rate(case: Case, server: str, other: str) -> Measure:
    return lambda figures: figures.compare((case, server), (case, other), per_s)


def _floor(key: str) -> Key:
    least_s, most_s = FLOOR_RANGES[key]
    takes = f"{least_s * 1e3:g} ms or more" if math.isinf(most_s) else f"{least_s * 1e3:g} to {most_s * 1e3:g} ms"

    def floor_model(figures: Figures) -> FloorModel:
        if (floor := choose_floors(figures.candidates).get(key)) is None:
            raise MissingFigure(f"no candidate takes {takes} here: {candidates_line(figures.candidates)}")
        return floor

    def measure(figures: Figures) -> float:
        return _rate(floor_model(figures).case, FRONT, FLOOR)(figures)

    def name(figures: Figures) -> str:
        floor = floor_model(figures)
        return f"{floor.case.model}, {significant(floor.seconds * 1e3):g} ms"

    what = f"requests/s on two cores to ONNX Runtime's in process, of a model that takes {takes} there"
    return Key(measure, what, name)


def candidates_line(seconds: Mapping[str, float]) -> str:
    """What each candidate takes, in words."""
    return ", ".join(f"{model} {significant(took * 1e3):g} ms" for model, took in seconds.items()) or "none measured"


def _envoy_share(figures: Figures) -> str:
    """Envoy's part of the CPU of a request to Triton behind it."""
    samples = next(iter(figures.samples(CLASSIFIER_JSON, ENVOY_TRITON).values()))
    own, all_of = (
        figures.median(CLASSIFIER_JSON, ENVOY_TRITON, cpu_us(*roles)) for roles in (("envoy",), samples.cpu_s)
    )
    return f"Envoy takes {own:,.0f} of their {all_of:,.0f} us of CPU"


def _of_another_benchmark(key: str) -> Measure:
    def measure(figures: Figures) -> float:
        if key not in figures.others:
            raise MissingFigure("the benchmark that measures it gave no figure")
        return figures.others[key]

    return measure


KEYS: Final[Mapping[str, Key]] = {
    "ready_vs_triton": Key(_rate(READY_16, FRONT, TRITON_TLS), "requests/s of ServerReady, both with TLS"),
    "small_vs_triton": Key(_rate(SMALL_16, FRONT, TRITON_TLS), "requests/s, 64 floats back as they are, both with TLS"),
    "classifier_vs_triton": Key(_rate(CLASSIFIER_16, FRONT, TRITON_TLS), "requests/s, both with TLS"),
    "cpu_us_small": Key(
        lambda figures: figures.median(SMALL_16, FRONT, cpu_us(*ROLES_OF_A_REQUEST)),
        "CPU of a small request in front and worker",
    ),
    "floor_10ms": _floor("floor_10ms"),
    "floor_1ms": _floor("floor_1ms"),
    "tensor_1mb_vs_triton": Key(_rate(MB1_1, FRONT, TRITON_TLS), "requests/s, both with TLS"),
    "json_vs_triton": Key(
        _rate(CLASSIFIER_JSON, FRONT, ENVOY_TRITON),
        "requests/s of the classifier as JSON, both with TLS, which Envoy ends before Triton on the same core",
        _envoy_share,
    ),
    "json_vs_triton_plain": Key(
        _rate(CLASSIFIER_JSON, FRONT, TRITON),
        "the same to Triton alone without TLS, which its HTTP port does not have; Shoal with it",
    ),
    "connections_1000": Key(
        lambda figures: figures.compare((CONNECTIONS, FRONT), (SMALL_16, FRONT), per_s),
        "requests/s over 1,000 connections to those over one",
    ),
    "gateway_added_p50_ms": Key(
        lambda figures: figures.compare(
            (SMALL_1, GATEWAY), (SMALL_1, FRONT), p50_s, lambda through, direct: (through - direct) * 1e3
        ),
        "p50 through the gateway less the front's own, one small request in flight",
    ),
    "gateway_cpu_us": Key(
        lambda figures: figures.median(SMALL_16, GATEWAY, cpu_us("gateway")),
        "CPU of the gateway's own process, a small request",
    ),
    "gateway_vs_envoy": Key(
        _rate(SMALL_16, GATEWAY, ENVOY),
        "requests/s of a small model, each before the same front, TLS on both sides, all on one core",
    ),
    "batching_gain": Key(
        _of_another_benchmark("batching_gain"),
        "requests/s with batches to those without, 32 in flight, of a model for which they pay: `shoal bench batching`",
    ),
    "flood_p99": Key(
        lambda figures: figures.compare((SMALL_FLOOD, FRONT), (SMALL_1, FRONT), p99_s),
        "p99 of a small request, one in flight, beside 64 in flight of a tenant beyond its quota, to the p99 without",
    ),
}
"""The keys of the last line: how each is computed, and what it compares. Ratios unless the name has a unit."""


def summary(figures: Figures) -> tuple[dict[str, float | None], list[str]]:
    """Values by key, and why each that is None is missing."""
    values, missing = dict[str, float | None](), list[str]()
    for key, each in KEYS.items():
        try:
            values[key] = significant(each.measure(figures))
        except MissingFigure as error:
            values[key] = None
            missing.append(f"{key}: {error}")
    return values, missing


def legend(figures: Figures) -> list[str]:
    """What each key compares."""
    lines = []
    for name, key in KEYS.items():
        try:
            more = f": {key.more(figures)}" if key.more is not None else ""
        except MissingFigure:
            more = ""
        lines.append(f"{name}: {key.what}{more}")
    return lines


def significant(value: float, digits: int = 3) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def table(figures: Figures) -> list[str]:
    """A line for each case and server: medians of the rounds."""
    lines = [f"{'':26} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'of triton':>9}  CPU us a request, by process"]
    for case in (*ONE_CORE, *figures.two_cores):
        rows = [server for name, server in figures.rounds if name == case.name]
        lines += [case.name] if rows else []
        lines += [_row(figures, case, server) for server in rows]
    return lines


def _row(figures: Figures, case: Case, server: str) -> str:
    def median(reading: Reading) -> float:
        return figures.median(case, server, reading)

    roles = next(iter(figures.samples(case, server).values())).cpu_s
    used = {role: median(_role_us(role)) for role in roles}
    parts = ", ".join(f"{role} {us:,.0f}" for role, us in sorted(used.items(), key=lambda item: -item[1]) if us >= 0.5)
    return (
        f"  {server:24} {median(per_s):>10,.0f} {median(p50_s) * 1e3:>8.2f} {median(p99_s) * 1e3:>8.2f} "
        f"{_of_triton(figures, case, server):>9}  {sum(used.values()):,.0f}: {parts}"
    )


def _role_us(role: str) -> Reading:
    return lambda sample: sample.cpu_s.get(role, 0.0) / sample.count * 1e6


def _of_triton(figures: Figures, case: Case, server: str) -> str:
    """To Triton's rate with TLS for servers with it where there is one, else without."""
    triton = ENVOY_TRITON if case.is_json else TRITON_TLS
    with_tls = server.endswith("TLS") and (case.name, triton) in figures.rounds
    try:
        return f"{_rate(case, server, triton if with_tls else TRITON)(figures):.2f}"
    except MissingFigure:
        return "-"
