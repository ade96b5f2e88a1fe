"""The client of all servers: h2load (C), with bodies that are made beforehand, so that the client is not the limit."""

import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from _serving.processes import on_core

WINDOW_BITS: Final = 24
"""The client's HTTP/2 windows: 16 MiB, so that none of the answers waits for one."""
EXTRA_S: Final = 60.0
"""A run that takes this much longer than it should is ended."""


class LoadError(Exception):
    """A run whose requests were not all answered."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, sent again and again."""

    # Scheme, host, port and path.
    url: str
    # Names and values.
    headers: tuple[tuple[str, str], ...]
    # As it is sent; of gRPC with the frame around its message.
    body: bytes
    # True: HTTP/1.1, where each request in flight has a connection of its own. False: HTTP/2.
    is_http1: bool
    # An answer has at least so many bytes of body. A refusal of gRPC has none, and a status of 200.
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What one run of the client saw."""

    # Requests answered.
    count: int
    # Answers a second.
    per_s: float
    # Median latency in seconds.
    p50_s: float
    # 99th percentile of the latency in seconds.
    p99_s: float
    # CPU seconds of the server by role; filled in by whoever watches it.
    cpu_s: dict[str, float] = field(default_factory=dict)


def run(
    requests: Sequence[HttpRequest],
    count: int,
    in_flight: int,
    connections: int,
    cores: Iterable[int] | None,
    limit_s: float,
    *,
    is_steady: bool = False,
) -> LoadSample:
    """Send `count` requests, `in_flight` at a time, and return when all are answered.

    requests: several are sent by as many clients at once, which share count and connections. is_steady: the rate of
    the later half, so that handshakes do not count. Raises LoadError.
    """
    share = len(requests)
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder, processes, lines = Path(name), [], list[str]()
        for number, request in enumerate(requests):
            body, log = folder / f"{number}.body", folder / f"{number}.log"
            body.write_bytes(request.body)
            streams = 1 if request.is_http1 else max(1, in_flight // connections)
            clients = in_flight if request.is_http1 else connections
            command = [
                "h2load", "-t", "1", "-n", str(count // share), "-c", str(clients // share), "-m", str(streams),
                "-w", str(WINDOW_BITS), "-W", str(WINDOW_BITS), f"--data={body}", f"--log-file={log}",
                *(["--h1"] if request.is_http1 else []),
                *(part for key, value in request.headers for part in ("-H", f"{key}: {value}")), request.url,
            ]  # fmt: skip
            process = subprocess.Popen(on_core(cores, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append((request, log, running.enter_context(process)))
        for request, log, process in processes:
            try:
                said = process.communicate(timeout=limit_s + EXTRA_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired as cause:
                for _, _, each in processes:
                    each.kill()
                raise LoadError(f"no end within {limit_s + EXTRA_S:.0f} s") from cause
            check(said, count // share, request.answer_bytes)
            lines += log.read_text().splitlines()
    return read_log(lines, is_steady=is_steady)


def check(said: str, count: int, answer_bytes: int) -> None:
    """Raises LoadError unless every request was answered with at least `answer_bytes`. said: h2load's output."""
    outcome = re.search(r"requests: .*", said)
    if f" {count} succeeded" not in said:
        raise LoadError(outcome[0] if outcome else said[-300:])
    traffic = re.search(r"\((\d+)\) data", said)
    received = int(traffic[1]) if traffic else 0
    if received < count * answer_bytes:
        raise LoadError(f"{received} bytes of {count} answers of at least {answer_bytes}: some were refusals")


def read_log(lines: Iterable[str], *, is_steady: bool = False) -> LoadSample:
    """lines: start in microseconds, status, microseconds until the end, separated by tabs. Raises LoadError."""
    rows = [tuple(map(int, line.split("\t")[:3])) for line in lines]
    if not rows:
        raise LoadError("no request ended")
    latencies = sorted(took for _, _, took in rows)
    ends = sorted(start + took for start, _, took in rows)
    if is_steady:
        ends = ends[len(ends) // 2 : len(ends) * 19 // 20]  # the last ones end while fewer are in flight
        count, wall_us = len(ends) - 1, ends[-1] - ends[0]
    else:
        count, wall_us = len(ends), ends[-1] - min(start for start, _, _ in rows)
    per_s = count / max(wall_us, 1) * 1e6
    return LoadSample(len(rows), per_s, quantile(latencies, 0.5) / 1e6, quantile(latencies, 0.99) / 1e6)


def quantile(ordered: Sequence[int], share: float) -> int:
    """The least value with at least `share` of all at or below it (nearest rank)."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


@contextmanager
def background(
    request: HttpRequest, in_flight: int, seconds: int, cores: Iterable[int] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Sends the request again and again for so long, over one connection, while the caller looks on."""
    with tempfile.TemporaryDirectory() as name:
        body = Path(name) / "body"
        body.write_bytes(request.body)
        command = [
            "h2load", "-t", "1", "-c", "1", "-m", str(in_flight), "-D", str(seconds), "--warm-up-time", "0",
            f"--data={body}", *(part for key, value in request.headers for part in ("-H", f"{key}: {value}")),
            request.url,
        ]  # fmt: skip
        process = subprocess.Popen(on_core(cores, command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
