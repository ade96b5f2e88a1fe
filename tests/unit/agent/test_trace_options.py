"""Where spans go and how many: flags, SHOAL_* variables and OpenTelemetry's own."""

import pytest

from shoal.agent.main import options


def parse_flags(*flags: str) -> tuple[str, float]:
    config = options.make_config(options.parser().parse_args(["run", *flags]))
    return config.otlp, config.trace_ratio


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SHOAL_OTLP",
        "SHOAL_TRACE_RATIO",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    ):
        monkeypatch.delenv(name, raising=False)


def test_off_unless_asked_for() -> None:
    assert parse_flags() == ("", 0.0)
    assert parse_flags("--trace-ratio", "0.5") == ("", 0.5)


def test_a_collector_brings_a_share_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_flags("--otlp", "http://a:1") == ("http://a:1", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:1")
    assert parse_flags() == ("http://b:1", 0.01)
    monkeypatch.setenv("SHOAL_OTLP", "http://c:1")
    monkeypatch.setenv("SHOAL_TRACE_RATIO", "0")
    assert parse_flags() == ("http://c:1", 0.0)
    assert parse_flags("--otlp", "http://d:1", "--trace-ratio", "1") == ("http://d:1", 1.0)


@pytest.mark.parametrize("ratio", ["2", "-0.1", "nan", "many"])
def test_a_share_is_between_none_and_all(ratio: str) -> None:
    with pytest.raises(SystemExit):
        parse_flags("--trace-ratio", ratio)
