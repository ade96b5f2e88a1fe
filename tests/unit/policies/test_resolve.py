"""Documents to what the engine reads, and to the form that is stored."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml import safe_load

from shoal.policies import (
    Policy,
    Region,
    Tenant,
    Workload,
    canonical,
    canonical_text,
    load,
    node_price,
    quota,
    read,
    resolve,
    trades,
)
from shoal.policies.resolve import node_rtt_s
from shoal.types import units
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Metric, MigrationRule, MigrationWindow, Tolerance
from shoal.types.units import parse_quantity, parse_unbounded, show_quantity
from shoal.types.workload import (
    DelegationMode,
    DelegationRule,
    Limits,
    ModelRef,
    PartitionRule,
    Preempt,
    Quota,
    Spread,
    Standby,
    TradeRule,
    Traffic,
    WorkloadKey,
)

POLICY = """
apiVersion: shoal/v1
kind: Policy
metadata: {name: kiosk-ocr}
spec:
  require:
    latency: {p95: 60ms, from: device}
    where: device.kind == "npu"
    residency: [eu]
    precision: {allow: [fp32]}
    availability: {replicas: 3, spread: node, standby: none, recovery: 5s}
    trust: {within: 24h}
  limits: {cost: 1.50 USD/h, energy: 2.0 J/inference, carbon: 40 gCO2/h}
  optimize: {energy: 5, cost: 3, latency: 2}
  relax:
    - latency: {p95: 90ms}
    - limits: {cost: 2.50 USD/h}
    - precision: {allow: [fp32, int8]}
      availability: {replicas: 2}
  partition: {heartbeat: 2s, lost_after: 20s, serve: 24h, cold_boot: wait, on_reconnect: keep-healthy}
  priority: 7
  preempt: lower
  scale: {to_zero_after: 10m}
"""
WORKLOAD = """
apiVersion: shoal/v1
kind: Workload
metadata: {name: receipt-text, tenant: shop, labels: {app: kiosk}}
spec:
  model: {source: ./a.onnx, variants: [{source: ./b.onnx, precision: int8}, {source: ./c.onnx}]}
  traffic: [{from: eu-west, rate: 120/s}, {from: eu-east, rate: 6/m}]
  policy: kiosk-ocr
"""
DIGESTS = {f"./{name}.onnx": ModelRef("elsewhere", f"sha256:{name}", "fp16") for name in "abc"}


def only(text: str) -> Any:
    loaded = load([("one.yaml", text)])
    assert loaded.problems == ()
    (document,) = loaded.documents
    return document.value


def test_policy_and_workload_become_an_intent() -> None:
    intent = resolve(only(WORKLOAD), only(POLICY), revision=4, digests=DIGESTS)
    assert intent.key == WorkloadKey("shop", "receipt-text")
    assert (intent.revision, intent.policy, intent.labels) == (4, "kiosk-ocr", {"app": "kiosk"})
    assert intent.models == (
        ModelRef("./a.onnx", "sha256:a", "fp16"),
        ModelRef("./b.onnx", "sha256:b", "int8"),
        ModelRef("./c.onnx", "sha256:c", "fp16"),
    )
    assert intent.to_zero_after_s == 600.0
    require = intent.require
    assert (require.latency_p95_s, require.latency_from_origin) == (0.06, False)
    assert (require.where, require.residency, require.precisions) == ('device.kind == "npu"', ("eu",), ("fp32",))
    assert (require.replicas, require.spread, require.standby) == (3, Spread.NODE, Standby.NONE)
    assert (require.recovery_s, require.measured_only, require.measured_within_s) == (5.0, True, 86400.0)
    assert intent.limits == Limits(units.UsdPerHour(1.5), units.Joules(2.0), units.GramsPerHour(40.0))
    assert intent.weights == {"latency": 0.2, "cost": 0.3, "energy": 0.5}
    assert intent.traffic == (
        Traffic("eu-west", units.PerSecond(120.0), units.PerSecond(120.0)),
        Traffic("eu-east", units.PerSecond(0.1), units.PerSecond(0.1)),
    )
    assert intent.partition == PartitionRule(
        units.Seconds(2.0), units.Seconds(20.0), units.Seconds(86400.0), cold_boot_serve=False
    )
    assert (intent.priority, intent.shared_worker, intent.max_batch) == (7, False, 1)
    assert intent.preempt is Preempt.LOWER


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", (1, 0.0, False)),
        ("{max: 8}", (8, 0.0, False)),
        ("{max: 8, delay: 5ms}", (8, 0.005, False)),
        ("{max: 8, padding: true}", (8, 0.0, True)),
    ],
)
def test_batches_are_made_where_they_are_asked_for(said: str, found: tuple[int, float, bool]) -> None:
    asked = f"{WORKLOAD.rstrip()}\n  batching: {said}\n" if said else WORKLOAD
    intent = resolve(only(asked), None, revision=1, digests=DIGESTS)
    assert (intent.max_batch, intent.batch_delay_s, intent.batch_padding) == found


def test_a_peak_of_zero_is_a_peak() -> None:
    quiet = WORKLOAD.replace("rate: 120/s", "rate: 120/s, peak: 0/s, when: 'hour(now, \"UTC\") > 8'")
    (found, _) = resolve(only(quiet), None, revision=1, digests=DIGESTS).traffic
    assert (found.rate, found.peak) == (120.0, 0.0)


def test_relaxations_add_up_in_order() -> None:
    relax = resolve(only(WORKLOAD), only(POLICY), revision=1, digests=DIGESTS).relax
    assert [step.change for step in relax] == [
        "latency: {p95: 90ms}",
        "limits: {cost: 2.5 USD/h}",
        "precision: {allow: [fp32, int8]}, availability: {replicas: 2}",
    ]
    assert [step.require.latency_p95_s for step in relax] == [0.09, 0.09, 0.09]
    assert [step.limits.cost for step in relax] == [1.5, 2.5, 2.5]
    assert [step.limits.energy for step in relax] == [2.0, 2.0, 2.0]
    assert [step.require.precisions for step in relax] == [("fp32",), ("fp32",), ("fp32", "int8")]
    assert [step.require.replicas for step in relax] == [3, 3, 2]
    assert [step.require.spread for step in relax] == [Spread.NODE] * 3


@pytest.mark.parametrize(
    ("policy", "variants", "pushed_in", "made"),
    [
        ("{allow: [fp32, int8], prepare: true}", "", "fp32", ["int8"]),
        ("{allow: [int8], prepare: true}", "", "fp32", ["int8"]),
        ("{allow: [fp32], prepare: true}", "", "fp32", ["int8"]),  # a step of `relax` allows it
        ("{allow: [fp16, int8], prepare: true}", "", "fp32", ["int8", "fp16"]),
        ("{allow: [fp16, int8], prepare: true}", ", variants: [{source: ./b.onnx, precision: fp16}]", "fp32", ["int8"]),
        ("{allow: [fp32, int8]}", "", "fp32", []),
        ("{allow: [fp32, int8], prepare: true}", "", "fp16", []),
        ("{allow: [fp32, int8], prepare: true}", ", variants: [{source: ./b.onnx, precision: int8}]", "fp32", []),
    ],
)
def test_what_nodes_may_make_of_the_model(policy: str, variants: str, pushed_in: str, made: list[str]) -> None:
    source = WORKLOAD.replace(", variants: [{source: ./b.onnx, precision: int8}, {source: ./c.onnx}]", variants)
    asked = POLICY.replace("    precision: {allow: [fp32]}", f"    precision: {policy}")
    if "int8" in policy:  # then the step would loosen nothing
        asked = asked.replace("    - precision: {allow: [fp32, int8]}\n      availability", "    - availability")
    digests = {name: ModelRef("elsewhere", each.digest, pushed_in) for name, each in DIGESTS.items()}
    models = resolve(only(source), only(asked), revision=1, digests=digests).models
    assert [each.precision for each in models if each.prepared] == made
    assert {each.digest for each in models if each.prepared} <= {models[0].digest}
    assert len({each.variant for each in models}) == len(models)


def test_a_policy_says_how_a_replica_moves() -> None:
    assert resolve(only(WORKLOAD), only(POLICY), revision=1, digests=DIGESTS).migration == MigrationRule()
    tolerance = (
        "tolerance: {outputs: {logits: {metric: max_abs, at_most: 1e-3}, text: {metric: cosine, at_least: 0.99}}}"
    )
    moves = POLICY.replace("allow: [fp32]}", f"allow: [fp32], {tolerance}}}") + (
        "  migration: {when: {gain: 25%, cooldown: 1m, max_concurrent: 2}, verify: {samples: 32, on_fail: continue},\n"
        "    shift: {steps: [5%, 100%], hold: 10s, guard: {errors: 0.5%, p95: 1.2x}}, drain: 20s,\n"
        "    windows: [{days: 'fri-sun, wed', from: 20:00, to: 06:00, zone: Europe/Paris}]}\n"
    )
    assert resolve(only(WORKLOAD), only(moves), revision=1, digests=DIGESTS).migration == MigrationRule(
        automatic=True,
        samples=32,
        advisory=True,
        tolerances=(Tolerance("logits", Metric.MAX_ABS, 1e-3), Tolerance("text", Metric.COSINE, 0.99)),
        steps=(0.05, 1.0),
        hold_s=units.Seconds(10.0),
        guard_errors=0.005,
        guard_p95=1.2,
        drain_s=units.Seconds(20.0),
        max_concurrent=2,
        gain=0.25,
        cooldown_s=units.Seconds(60.0),
        windows=(MigrationWindow((2, 4, 5, 6), 20 * 60, 6 * 60, "Europe/Paris"),),
    )


def test_without_a_policy_the_defaults_hold() -> None:
    intent = resolve(only(WORKLOAD.replace("  policy: kiosk-ocr\n", "")), None, revision=1, digests=DIGESTS)
    assert intent.policy == ""
    assert intent.weights == {"latency": 1.0}
    assert (intent.require.replicas, intent.require.where, intent.require.latency_p95_s) == (1, "", None)
    assert (intent.require.measured_only, intent.limits, intent.relax) == (False, Limits(), ())
    assert (intent.partition, intent.priority, intent.preempt) == (PartitionRule(), 100, Preempt.NEVER)


def test_a_source_without_digest_is_refused() -> None:
    with pytest.raises(ShoalError) as caught:
        resolve(only(WORKLOAD), None, revision=1, digests={})
    assert caught.value.code == Code.MODEL_UNKNOWN
    assert "./a.onnx" in caught.value.refusal.found


FEDERATED = POLICY.replace("  priority: 7", "  federation: {%s}\n  priority: 7")
REGION = "apiVersion: shoal/v1\nkind: Region\nmetadata: {name: r}\nspec: %s\n"


def parse(text: str) -> Any:
    """What the types say of it, whatever acts on its fields in this release."""
    return read(safe_load(text))


@pytest.mark.parametrize(
    ("typed", "delegation"),
    [
        ("delegate: when-better, margin: 15%, to: [eu-*, us-1], term: 1h",
         DelegationRule(DelegationMode.WHEN_BETTER, 0.15, ("eu-*", "us-1"), units.Seconds(3600.0))),
        ("delegate: when-infeasible", DelegationRule(DelegationMode.WHEN_INFEASIBLE)),
        ("delegate: never", DelegationRule()),
    ],
)  # fmt: skip
def test_delegation_is_as_typed(typed: str, delegation: DelegationRule) -> None:
    intent = resolve(only(WORKLOAD), parse(FEDERATED % typed), revision=1, digests=DIGESTS)
    assert intent.delegation == delegation


def test_without_a_word_nothing_is_delegated_and_nobody_traded_with() -> None:
    assert resolve(only(WORKLOAD), only(POLICY), revision=1, digests=DIGESTS).delegation == DelegationRule()
    assert DelegationRule().mode is DelegationMode.NEVER
    assert trades(only(REGION % "{price: 1 USD/h}")) == ()


def test_trades_keep_their_order() -> None:
    spec = '{trade: [{with: "eu-*", tenants: [shop], hold_share: 5%}, {with: "*"}]}'
    assert trades(parse(REGION % spec)) == (TradeRule("eu-*", ("shop",), 0.05), TradeRule("*", ("*",), 0.2))


def test_a_distance_is_the_labels_else_unknown() -> None:
    assert node_rtt_s({"rtt": "20ms"}) == 0.02
    assert math.isnan(node_rtt_s({"rtt": "near"}))


def test_quota() -> None:
    text = "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: shop}\nspec: {quota: {replicas: 20, memory: 16GiB}}\n"
    assert quota(only(text)) == Quota("shop", 20, units.Bytes(16 << 30))
    assert quota(only(text.replace(", memory: 16GiB", ""))) == Quota("shop", 20)
    assert quota(only(text.replace("memory: 16GiB", "cost: 12 USD/d"))) == Quota("shop", 20, cost=units.UsdPerHour(0.5))
    text = text.replace("replicas: 20, memory: 16GiB}", "rate: 500/s, concurrency: 64}, weight: 2")
    limited = Quota("shop", rate=units.PerSecond(500.0), concurrency=64, weight=2.0)
    assert quota(only(text)) == limited


def test_a_price_is_the_labels_else_the_regions_else_unknown() -> None:
    region = units.UsdPerHour(0.4)
    assert node_price({"price": "0.05 USD/h"}, region) == 0.05
    assert node_price({}, region) == 0.4
    assert node_price({}, None) is None
    assert node_price({"price": "cheap"}, region) is None


EXAMPLES = sorted((Path(__file__).parents[3] / "policies" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_are_valid_commented_and_resolve(path: Path) -> None:
    text = path.read_text()
    loaded = load([(path.name, text)])
    assert [str(problem) for problem in loaded.problems] == []
    assert text.startswith("# Need: ")
    values = [document.value for document in loaded.documents]
    policies = {value.metadata.name: value for value in values if isinstance(value, Policy)}
    workloads = [value for value in values if isinstance(value, Workload)]
    assert workloads or path.stem == "region"
    for workload in workloads:
        sources = [workload.spec.model.source, *(variant.source for variant in workload.spec.model.variants)]
        pinned = {source: ModelRef(source, "sha256:0", "fp32") for source in sources}
        intent = resolve(workload, policies[workload.spec.policy or ""], revision=1, digests=pinned)
        assert intent.policy in policies


def test_there_is_an_example_for_each_need() -> None:
    assert len(EXAMPLES) >= 6


TEXTS = [POLICY, WORKLOAD, *(path.read_text() for path in EXAMPLES)]


@pytest.mark.parametrize("text", TEXTS)
def test_canonical_form_reads_back_and_is_stable(text: str) -> None:
    for document in load([("a.yaml", text)]).documents:
        stored = canonical(document.value)
        again = read(stored)
        assert again == document.value
        assert canonical(again) == stored
        assert canonical_text(again) == canonical_text(document.value)
        assert "\n" not in canonical_text(again)


def test_canonical_form_is_the_same_for_the_same_meaning() -> None:
    one = only("apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: p}\nspec: {require: {latency: {p95: 60ms}}}\n")
    two = only('{"spec": {"require": {"latency": {"p95": "0.06 s"}}}, "kind": "Policy", "apiVersion": "shoal/v1",\n'
               ' "metadata": {"name": "p"}}')  # fmt: skip
    assert canonical_text(one) == canonical_text(two)


def test_canonical_form_of_what_code_made() -> None:
    for value in (
        Tenant.model_validate({"metadata": {"name": "t"}}),
        Region.model_validate({"metadata": {"name": "r"}, "spec": {"price": "2 USD/d"}}),
    ):
        stored = canonical(value)
        assert (stored["apiVersion"], stored["kind"]) == ("shoal/v1", value.kind)
        assert canonical(read(stored)) == stored


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        ({"kind": "Secret"}, Code.KIND_UNKNOWN),
        ({}, Code.FIELD_MISSING),
        ({"kind": "Policy", "metadata": {"name": "A"}}, Code.NAME_INVALID),
        ({"kind": "Policy", "metadata": {"name": "a"}, "colour": 1}, Code.FIELD_UNKNOWN),
    ],
)
def test_a_stored_document_that_is_none_is_refused(stored: dict[str, Any], code: Code) -> None:
    with pytest.raises(ShoalError) as caught:
        read(stored)
    assert caught.value.code == code


DIMENSIONS = [value for value in vars(units).values() if isinstance(value, units.Dimension)]


@given(
    st.sampled_from([one for one in DIMENSIONS if 1.0 in one.factors.values()]),
    st.one_of(
        st.floats(min_value=0, max_value=1e15, allow_nan=False),
        st.integers(min_value=0, max_value=10**12).map(float),
        st.decimals(min_value=0, max_value=10**6, places=3).map(float),
    ),
)
def test_quantities_come_back_exactly(dimension: units.Dimension, value: float) -> None:
    assert parse_unbounded(show_quantity(value, dimension), dimension) == value


@given(st.sampled_from(DIMENSIONS), st.data())
def test_quantities_as_typed_come_back(dimension: units.Dimension, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(dimension.factors)))
    number = data.draw(st.decimals(min_value=0, max_value=3650, places=2))
    value = parse_quantity(f"{number} {unit}", dimension)
    shown = show_quantity(value, dimension)
    assert parse_quantity(shown, dimension) == value
    assert show_quantity(parse_quantity(shown, dimension), dimension) == shown


SHOWN = [
    ("1.50 USD/h", units.COST, "1.5 USD/h"), ("60ms", units.DURATION, "60ms"), ("24h", units.DURATION, "1d"),
    ("0s", units.DURATION, "0s"), ("1.2s", units.DURATION, "1.2s"), ("300us", units.DURATION, "300us"),
    ("16GiB", units.SIZE, "16GiB"), ("500MB", units.SIZE, "500MB"), ("15%", units.SHARE, "15%"),
    ("2.0 J/inference", units.ENERGY, "2 J/inference"), ("1.2x", units.RATIO, "1.2x"), ("120/s", units.RATE, "120/s"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "dimension", "shown"), SHOWN)
def test_quantities_are_shown_as_people_write_them(typed: str, dimension: units.Dimension, shown: str) -> None:
    assert show_quantity(parse_quantity(typed, dimension), dimension) == shown


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=lambda each: each.name)
def test_a_quantity_beyond_every_real_one_is_refused(dimension: units.Dimension) -> None:
    """Sums of some, dates and the integers of messages must hold what is accepted."""
    most = show_quantity(dimension.most, dimension)
    assert parse_quantity(most, dimension) == dimension.most < 2**63
    for unit in dimension.factors:
        with pytest.raises(ShoalError, match=f"at most {most}") as caught:
            parse_quantity(f"1e30{unit}", dimension)
        assert caught.value.code == Code.QUANTITY_INVALID
