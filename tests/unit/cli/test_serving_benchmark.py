"""The pure parts of `shoal bench serving`: what the client's output says, medians and ratios, the last line, layers."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[3] / "benchmarks"
SAID = """
finished in 1.01s, {rate} req/s, 1.20MB/s
requests: {total} total, {total} started, {total} done, {good} succeeded, 0 failed, 0 errored, 0 timeout
status codes: {good} 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.38MB (1448020) total, 62.53KB (64032) headers (space savings 90.91%), 1.17MB ({data}) data
"""


@pytest.fixture(scope="module")
def serving() -> Any:
    """Its own folder comes first, as when it is run. Nothing of it stays for other tests."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("serving")
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if name in ("serving", "_machine", "_compiled") or name.startswith("_serving"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def figures(serving: Any) -> Any:
    return serving.f


def sample(serving: Any, per_s: float = 100.0, p50_s: float = 0.01, **cpu_s: float) -> Any:
    return serving.LoadSample(1000, per_s, p50_s, 2 * p50_s, cpu_s)


# the client's output


def test_every_request_must_be_answered(serving: Any) -> None:
    serving.h2load.check(SAID.format(rate=99, total=100, good=100, data=26_100), 100, 261)
    with pytest.raises(serving.LoadError, match="98 succeeded"):
        serving.h2load.check(SAID.format(rate=99, total=100, good=98, data=26_100), 100, 261)


def test_refusals_of_grpc_are_seen_by_the_bytes_that_they_lack(serving: Any) -> None:
    with pytest.raises(serving.LoadError, match="refusals"):
        serving.h2load.check(SAID.format(rate=99, total=100, good=100, data=26_099), 100, 261)


def test_a_log_gives_rate_and_latencies(serving: Any) -> None:
    lines = [f"{1_000_000 + number * 1000}\t200\t{1000 + number}" for number in range(100)]
    found = serving.h2load.read_log(lines)
    assert found.count == 100
    assert found.per_s == pytest.approx(100 / 0.100099)  # from the first start to the last end
    assert (found.p50_s, found.p99_s) == (pytest.approx(0.001049), pytest.approx(0.001098))


def test_a_steady_rate_leaves_out_the_first_half_and_the_end(serving: Any) -> None:
    slow = [f"{number * 100_000}\t200\t1000" for number in range(100)]
    fast = [f"{10_000_000 + number * 1000}\t200\t1000" for number in range(100)]
    assert serving.h2load.read_log([*slow, *fast], is_steady=True).per_s == pytest.approx(1000)


def test_a_log_without_a_request_is_no_figure(serving: Any) -> None:
    with pytest.raises(serving.LoadError):
        serving.h2load.read_log([])


@given(st.lists(st.integers(0, 10**6), min_size=1), st.floats(0.001, 1.0))
def test_a_quantile_has_its_share_at_or_below_it(serving: Any, values: list[int], share: float) -> None:
    ordered = sorted(values)
    found = serving.h2load.quantile(ordered, share)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-6
    assert sum(value < found for value in ordered) < share * len(ordered) + 1e-6


# figures


def test_ratios_are_medians_of_what_each_round_compares(serving: Any, figures: Any) -> None:
    found = figures.Figures()
    for number, (ours, others) in enumerate(((200, 100), (40, 10), (900, 300))):  # the machine slows in the second
        found.add(figures.SMALL_16, figures.FRONT, number, sample(serving, ours))
        found.add(figures.SMALL_16, figures.TRITON_TLS, number, sample(serving, others))
    found.add(figures.SMALL_16, figures.FRONT, 3, sample(serving, 1))  # Triton has no fourth
    values, _ = figures.summary(found)
    assert values["small_vs_triton"] == 3.0


def test_cpu_is_that_of_the_processes_named(serving: Any, figures: Any) -> None:
    found = figures.Figures()
    found.add(figures.SMALL_16, figures.FRONT, 1, sample(serving, front=0.1, worker=0.05, supervisor=1.0))
    found.add(figures.SMALL_16, figures.GATEWAY, 1, sample(serving, front=0.1, gateway=0.08))
    values, _ = figures.summary(found)
    assert values["cpu_us_small"] == 150.0
    assert values["gateway_cpu_us"] == 80.0


def test_a_gateway_s_p50_is_compared_with_the_front_s_of_its_round(serving: Any, figures: Any) -> None:
    found = figures.Figures()
    for number, base in enumerate((0.001, 0.005, 0.002)):
        found.add(figures.SMALL_1, figures.FRONT, number, sample(serving, p50_s=base))
        found.add(figures.SMALL_1, figures.GATEWAY, number, sample(serving, p50_s=base + 0.0002))
    assert figures.summary(found)[0]["gateway_added_p50_ms"] == 0.2


def test_what_was_not_measured_is_null_with_its_reason(figures: Any) -> None:
    values, missing = figures.summary(figures.Figures())
    assert set(values.values()) == {None}
    assert len(missing) == len(values)
    assert any(line.startswith("small_vs_triton: no figure of shoal front, TLS") for line in missing)
    assert json.loads(json.dumps(values)) == values


def test_a_figure_of_another_benchmark_is_joined(serving: Any, figures: Any) -> None:
    found = figures.Figures(others={"batching_gain": 2.5})
    found.add(figures.SMALL_1, figures.FRONT, 1, sample(serving, p50_s=0.001))
    found.add(figures.SMALL_FLOOD, figures.FRONT, 1, sample(serving, p50_s=0.0012))
    values, _ = figures.summary(found)
    assert (values["batching_gain"], values["flood_p99"]) == (2.5, 1.2)


def test_the_last_line_has_the_agreed_keys(figures: Any) -> None:
    keys = (
        "ready_vs_triton small_vs_triton classifier_vs_triton cpu_us_small floor_10ms floor_1ms tensor_1mb_vs_triton "
        "json_vs_triton json_vs_triton_plain connections_1000 gateway_added_p50_ms gateway_cpu_us gateway_vs_envoy "
        "batching_gain flood_p99"
    )
    assert list(figures.KEYS) == keys.split()


def test_json_is_compared_with_triton_behind_tls_and_without(serving: Any, figures: Any) -> None:
    found = figures.Figures()
    found.add(figures.CLASSIFIER_JSON, figures.FRONT, 1, sample(serving, 300))
    found.add(figures.CLASSIFIER_JSON, figures.ENVOY_TRITON, 1, sample(serving, 250, envoy=0.5, tritonserver=2.0))
    found.add(figures.CLASSIFIER_JSON, figures.TRITON, 1, sample(serving, 400))
    values, _ = figures.summary(found)
    assert (values["json_vs_triton"], values["json_vs_triton_plain"]) == (1.2, 0.75)
    assert any("json_vs_triton: " in line and "500 of their 2,500 us" in line for line in figures.legend(found))
    rows = {row.split("  ")[1].strip(): row for row in figures.table(found)[2:]}
    assert "1.20" in rows[figures.FRONT]


@pytest.mark.parametrize(
    ("took_ms", "chosen"),
    [
        ({"classifier": 0.62, "detector-96": 1.6, "recogniser-32": 1.9, "magika": 4.6, "recogniser": 11.0},
         {"floor_10ms": "recogniser", "floor_1ms": "detector-96"}),
        ({"classifier": 1.0, "magika": 10.0, "recogniser": 25.0}, {"floor_10ms": "magika", "floor_1ms": "classifier"}),
        ({"classifier": 0.99, "detector-96": 2.01, "recogniser": 9.9}, {}),
    ],
)  # fmt: skip
def test_a_floor_is_of_the_shortest_model_in_its_range(
    figures: Any, took_ms: dict[str, float], chosen: dict[str, str]
) -> None:
    found = figures.choose_floors({model: took / 1e3 for model, took in took_ms.items()})
    assert {key: floor.case.model for key, floor in found.items()} == chosen


def test_a_floor_names_its_model(serving: Any, figures: Any) -> None:
    found = figures.Figures(candidates={"classifier": 0.0015, "recogniser": 0.0112})
    *usual, own = found.two_cores  # the classifier has a case already
    assert (tuple(usual), own.model) == (figures.TWO_CORES, "recogniser")
    found.add(own, figures.FRONT, 1, sample(serving, 90))
    found.add(own, figures.FLOOR, 1, sample(serving, 100))
    values, missing = figures.summary(found)
    assert (values["floor_10ms"], values["floor_1ms"]) == (0.9, None)
    assert any(line.startswith("floor_1ms: no figure of shoal front, TLS") for line in missing)
    assert any(
        line.startswith("floor_10ms: ") and line.endswith(": recogniser, 11.2 ms") for line in figures.legend(found)
    )
    assert own.name in figures.table(found)


def test_a_floor_without_a_model_is_null(figures: Any) -> None:
    _, missing = figures.summary(figures.Figures(candidates={"classifier": 0.00062, "magika": 0.0046}))
    said = "floor_1ms: no candidate takes 1 to 2 ms here: classifier 0.62 ms, magika 4.6 ms"
    assert said in missing


def test_what_one_caller_sends_as_bytes_has_a_floor(figures: Any) -> None:
    assert {case for case in figures.ONE_CORE if not case.has_floor} == {
        figures.READY_16, figures.SMALL_JSON, figures.CLASSIFIER_JSON, figures.CONNECTIONS, figures.SMALL_FLOOD
    }  # fmt: skip


def test_envoy_passes_on_with_tls_where_there_is_some(serving: Any) -> None:
    envoy = sys.modules["_serving.envoy"]

    def bootstrap_of(url: str, roots: str, is_http1: bool) -> tuple[str, Any]:
        address = sys.modules["_serving.servers"].Address(url, (), roots, "front")
        static = envoy.bootstrap(1, address, Path("c"), Path("k"), is_http1=is_http1)["static_resources"]
        chain = static["listeners"][0]["filter_chains"][0]
        assert chain["transport_socket"]["name"] == "envoy.transport_sockets.tls"
        return chain["filters"][0]["typed_config"]["codec_type"], static["clusters"][0].get("transport_socket")

    assert bootstrap_of("http://127.0.0.1:8000", "", True) == ("HTTP1", None)
    codec, upstream = bootstrap_of("https://127.0.0.1:8001", "ca.pem", False)
    assert codec == "HTTP2"
    assert upstream["typed_config"]["common_tls_context"]["validation_context"] == {
        "trusted_ca": {"filename": "ca.pem"}
    }


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.0, 0.0), (1.23456, 1.23), (123456.0, 123456.0), (0.0012345, 0.00123), (15.06, 15.1)]
)
def test_figures_have_three_digits(figures: Any, value: float, rounded: float) -> None:
    assert figures.significant(value) == rounded


def test_a_table_has_a_row_for_each_server_of_a_case(serving: Any, figures: Any) -> None:
    found = figures.Figures()
    found.add(figures.SMALL_16, figures.FRONT, 1, sample(serving, 1000, front=0.1, worker=0.05))
    found.add(figures.SMALL_16, figures.TRITON_TLS, 1, sample(serving, 500, tritonserver=0.2))
    head, case, *rows = figures.table(found)
    assert "of triton" in head
    assert case == "small, 16 in flight"
    assert [row.split("  ")[1].strip() for row in rows] == [figures.FRONT, figures.TRITON_TLS]
    assert "2.00  150: front 100, worker 50" in rows[0]


# who is asked what


def test_a_server_is_asked_by_a_protocol_that_it_has(serving: Any, figures: Any) -> None:
    grpc, json_, own = serving.Protocol.GRPC, serving.Protocol.JSON, serving.Protocol.OWN_JSON

    def protocol(case: Any, name: str, *protocols: Any) -> Any:
        return serving.protocol_of(case, serving.Server(name, dict.fromkeys(protocols), dict))

    assert protocol(figures.SMALL_16, "x", grpc, json_) is grpc
    assert protocol(figures.SMALL_JSON, "x", grpc, json_) is json_
    assert protocol(figures.SMALL_JSON, "x", own) is own
    assert protocol(figures.SMALL_16, "x", own) is None
    assert protocol(figures.CONNECTIONS, "x", grpc) is None
    assert protocol(figures.CONNECTIONS, figures.FRONT, grpc) is grpc


def test_cpu_counts_new_threads_and_no_new_processes(serving: Any) -> None:
    before = {("front", 1, 1): 10**9, ("worker", 2, 2): 0}
    after = {("front", 1, 1): 3 * 10**9, ("front", 1, 9): 10**9, ("worker", 3, 3): 10**9}
    assert serving.cpu_between(before, after) == {"front": 3.0}


# layers


LOOP = "BaseEventLoop._run_once (/lib/python3.11/asyncio/base_events.py:1)"


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        ((LOOP,), "event loop and sockets"),
        (("run (/x/shoal/agent/dataplane/main.py:3)", LOOP, "_run (/lib/python3.11/asyncio/events.py:1)"),
         "event loop and sockets"),
        ((LOOP, "infer (/x/shoal/agent/dataplane/front.py:3)", "sleep (/lib/python3.11/asyncio/tasks.py:1)"),
         "route and retries"),
        ((LOOP, "data_received (/v/site-packages/shoal/host/tls.py:9)", "read (/lib/python3.11/ssl.py:9)"), "TLS"),
        ((LOOP, "receive (/x/shoal/http2/connection.py:9)", "on_data (/x/shoal/host/grpc_server.py:4)"), "gRPC"),
        ((LOOP, "receive (/x/shoal/http2/connection.py:9)", "decode (/v/site-packages/hpack/hpack.py:4)"), "HTTP/2"),
        ((LOOP, "call (/x/shoal/agent/dataplane/ingress_admission.py:9)", "enter (/lib/python3.11/contextlib.py:4)"),
         "auth and admission"),
        ((LOOP, "_execute (/x/shoal/agent/worker/model_runner.py:1)", "run (/v/site-packages/onnxruntime/capi/x.py:1)"),
         "worker: run"),
        (("run (/lib/python3.11/threading.py:1)", "_execute (/x/shoal/agent/worker/model_runner.py:1)"),
         "worker: queue and metering"),
        (("main (/somewhere/else.py:1)",), "other"),
    ],
)  # fmt: skip
def test_the_innermost_frame_of_a_layer_counts(serving: Any, stack: tuple[str, ...], layer: str) -> None:
    assert serving.layers.layer_of(stack)[0] == layer


@pytest.mark.parametrize(
    "frame",
    [
        "EpollSelector.select (/lib/python3.11/selectors.py:468)",
        "_worker (/lib/python3.11/concurrent/futures/thread.py:81)",
    ],
)
def test_a_thread_that_waits_is_in_no_layer(serving: Any, frame: str) -> None:
    assert serving.layers.layer_of((LOOP, frame)) is None
    assert serving.layers.count_layers([f"{LOOP};{frame} 10"]) == {}


def test_samples_are_counted_by_layer(serving: Any) -> None:
    tls, other = "write (/x/shoal/host/tls.py:1)", "read (/x/shoal/host/tls.py:1)"
    found = serving.layers.count_layers([f"{LOOP};{tls} 20", f"{LOOP};{other} 10", f"{LOOP} 10", ""])
    assert found == {
        "TLS": serving.layers.LayerSamples(30, "tls.write"),
        "event loop and sockets": serving.layers.LayerSamples(10, "base_events.BaseEventLoop._run_once"),
    }
    head, first, _ = serving.layers.table("front", found, 100.0)
    assert head == "front: 100 us of CPU a request, 40 samples"
    assert first.split() == ["TLS", "75.0", "us", "75.0%", "(+-6.8%)", "most:", "tls.write"]


def test_every_module_of_the_data_plane_is_in_a_layer(serving: Any) -> None:
    agents, protos = FOLDER.parent / "agents", FOLDER.parent / "protos"
    modules = [*(agents / "shoal/agent").rglob("*.py"), *(protos / "shoal/http2").glob("*.py")]
    assert modules
    for module in modules:
        assert serving.layers.layer_of((f"f ({module}:1)",))[0] not in ("other", "event loop and sockets"), module
