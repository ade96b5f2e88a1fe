"""Spans to a collector: what it is told, and that nobody waits for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from harness.crypto.pki import Authority
from harness.servers.otlp_collector import OtlpReceiver, collector
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.host import otlp
from shoal.host.otlp import Exporter, collector_of, endpoint_of, ratio_of, request_of
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.trace import Span, SpanKind
from shoal.types.units import Seconds, Wall

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def span(number: int, node: str = "n-1", code: str = "") -> Span:
    where = ("eu", node, "front")
    return Span(
        TRACE, f"{number:016x}", "", "request", SpanKind.SERVER, *where, Wall(1.7e9), Seconds(0.25), {"k": "v"}, code
    )


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with collector() as found:
        yield found


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "GATHER_S", 0.01)
    monkeypatch.setattr(otlp, "PAUSE_S", 0.01)
    monkeypatch.setattr(otlp, "LAST_S", 0.5)


@asynccontextmanager
async def running(exporter: Exporter) -> AsyncIterator[None]:
    task = asyncio.create_task(exporter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_exported(exporter: Exporter, exported: int, dropped: int = 0) -> None:
    await until(lambda: exporter.exported >= exported and exporter.dropped >= dropped, 20.0, "spans to be taken")


async def test_spans_arrive_as_the_protocol_has_them(receiver: OtlpReceiver) -> None:
    exporter = Exporter(collector_of(receiver.endpoint, {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, X-Two=2"}))
    async with running(exporter):
        exporter.offer([span(1), span(2, "n-2", "OVERLOADED")])
        await wait_exported(exporter, 2)
    (one, first), (two, second) = receiver.spans(TRACE)
    assert (one, two) == ("shoal-front/eu/n-1", "shoal-front/eu/n-2")
    assert (first.name, first.kind, first.span_id.hex()) == ("request", first.SPAN_KIND_SERVER, f"{1:016x}")
    assert second.start_time_unix_nano == 1_700_000_000 * 10**9
    assert second.end_time_unix_nano - second.start_time_unix_nano == 250 * 10**6
    assert {each.key: each.value.string_value for each in first.attributes} == {"k": "v"}
    assert (first.status.code, second.status.code) == (first.status.STATUS_CODE_UNSET, first.status.STATUS_CODE_ERROR)
    assert second.status.message == "OVERLOADED"
    assert {"api-key": "a b", "x-two": "2"}.items() <= receiver.metadata[0].items()


async def test_what_a_collector_may_take_later_is_sent_again_and_what_it_never_will_is_dropped(
    receiver: OtlpReceiver,
) -> None:
    receiver.refuse = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    exporter = Exporter(collector_of(receiver.endpoint))
    async with running(exporter):
        exporter.offer([span(1)])
        await wait_exported(exporter, 1)
        receiver.refuse = [grpc.StatusCode.INVALID_ARGUMENT]
        exporter.offer([span(2)])
        exporter.offer([span(2)])
        await wait_exported(exporter, 1, 2)
        exporter.offer([span(3)])
        await wait_exported(exporter, 2)
    assert [each.span_id.hex() for _, each in receiver.spans()] == [f"{number:016x}" for number in (1, 3)]
    assert (exporter.exported, exporter.dropped) == (2, 2)


async def test_the_oldest_go_where_nobody_takes_them_and_the_last_are_sent_at_the_end(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 30.0)
    exporter = Exporter(collector_of(receiver.endpoint))
    exporter.offer([span(number) for number in range(otlp.QUEUE_LIMIT + 5)])
    assert exporter.dropped == 5
    async with running(exporter):
        await wait_exported(exporter, 1)
    sent = [int(each.span_id.hex(), 16) for _, each in receiver.spans()]
    assert set(sent) == set(range(5, otlp.QUEUE_LIMIT + 5)), "a batch that was on its way at the end is sent again"
    assert max(sum(len(s.spans) for g in call.resource_spans for s in g.scope_spans) for call in receiver.calls) <= 512


async def test_a_collector_that_is_not_there_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 0.1)
    exporter = Exporter(collector_of("http://127.0.0.1:9"))
    exporter.offer([span(1)])
    task = asyncio.create_task(exporter.run())
    await asyncio.wait([task], timeout=0.1)
    task.cancel()
    await asyncio.wait([task], timeout=5.0)
    assert task.cancelled()
    assert (exporter.exported, exporter.dropped) == (0, 1)


async def test_without_a_collector_nothing_is_kept_and_nobody_waits() -> None:
    exporter = Exporter.from_endpoint("")
    exporter.offer([span(number) for number in range(otlp.QUEUE_LIMIT + 5)])
    await asyncio.wait_for(exporter.run(), 5.0)
    assert (exporter.is_enabled, exporter.exported, exporter.dropped) == (False, 0, 0)
    assert Exporter.from_endpoint("http://otel").is_enabled


def test_whoever_serves_goes_on_without_the_cas_that_were_there_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(b"CA")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authorities))
    assert Exporter.from_endpoint("https://otel.example").is_enabled
    authorities.unlink()
    assert not Exporter.from_endpoint("https://otel.example").is_enabled


async def test_over_tls_only_whom_the_authority_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "west", SystemClock().wall())
    with collector(authority.issue(Role.AGENT, "otel")) as receiver:
        trusted = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority.certificate)}
        known, unknown = (Exporter(collector_of(receiver.endpoint, said)) for said in (trusted, {}))
        async with running(known), running(unknown):
            unknown.offer([span(1)])
            known.offer([span(2)])
            await wait_exported(known, 1)
        assert [each.span_id.hex() for _, each in receiver.spans()] == [f"{2:016x}"]
        assert (unknown.exported, unknown.dropped) == (0, 1)


def test_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"CA")
    found = collector_of("https://otel.example", {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem")})
    assert (found.target, found.tls, found.roots, found.headers) == ("otel.example:4317", True, b"CA", ())
    assert collector_of("http://[::1]:4318/", {}).target == "[::1]:4318"
    for bad in (
        "",
        "otel:4317",
        "grpc://otel:4317",
        "http://",
        "http://otel:99999",
        "http://a:b@otel",
        "http://otel/v1",
    ):
        with pytest.raises(ShoalError) as error:
            collector_of(bad, {})
        assert error.value.code is Code.FIELD_INVALID
    assert endpoint_of({}) == ""
    assert endpoint_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "b"}) == "b"
    assert (ratio_of(None, ""), ratio_of(None, "http://otel")) == (0.0, 0.01)
    assert (ratio_of(0.5, ""), ratio_of(0.0, "http://otel")) == (0.5, 0.0)


@pytest.mark.parametrize(
    "said",
    [
        {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=canary%0Ax"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "ok=1,api key=canary"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=canary%C3%A9"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "key-bin=canary"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "=canary"},
        {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere/ca.pem"},
    ],
)
def test_what_would_end_the_export_is_refused_at_the_start(said: dict[str, str]) -> None:
    with pytest.raises(ShoalError) as error:
        collector_of("https://otel.example", said)
    assert error.value.code is Code.FIELD_INVALID
    assert "canary" not in str(error.value)


def test_a_collectors_headers_are_shown_nowhere() -> None:
    assert "canary" not in repr(collector_of("http://otel", {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=canary"}))


def test_those_of_one_process_are_told_together() -> None:
    request = request_of([span(1, "a"), span(2, "b"), span(3, "a")])
    assert [len(group.scope_spans[0].spans) for group in request.resource_spans] == [2, 1]
