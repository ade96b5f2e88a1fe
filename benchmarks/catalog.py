"""What a plan, an apply and a can-move cost in the catalog, by the number of stored documents: `shoal bench catalog`.

A region holds one Region, policies, tenants and workloads. Each call proposes one workload and reads what placement
reads of the result; placement itself is not measured. Beside it in the same run: the same plan where every stored
document is parsed again, and their reading as YAML. Times are of the processor: nothing here waits.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from shoal.coordinator import codec
from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.core.catalog.model import Catalog, ModelRecord, StoredDocument
from shoal.coordinator.core.catalog.propose import propose
from shoal.policies import load
from shoal.types.units import Wall

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.builders.coordinator_core import profile

REGION = "eu"
MODELS = 50
ANEW = 3
"""Calls that parse everything: each takes as long as tens of the others."""
Given = TypeVar("Given")
POLICY = """apiVersion: shoal/v1
kind: Policy
metadata: {{name: policy-{number}}}
spec:
  require:
    latency: {{p95: {number}ms, from: device}}
    where: device.kind == "cpu" && node.labels["site"] == "site-{number}"
    availability: {{replicas: 2, spread: node, recovery: 30s}}
  limits: {{cost: 1.50 USD/h}}
  optimize: {{energy: 5, cost: 3, latency: 2}}
  relax: [{{latency: {{p95: 200ms}}}}, {{limits: {{cost: 2.50 USD/h}}}}]
  migration: {{verify: {{against: reference}}, shift: {{steps: [10%, 100%], hold: 5s}}}}
"""
TENANT = """apiVersion: shoal/v1
kind: Tenant
metadata: {{name: tenant-{number}}}
spec: {{quota: {{replicas: 100}}}}
"""
WORKLOAD = """apiVersion: shoal/v1
kind: Workload
metadata: {{name: workload-{number}, tenant: tenant-{tenant}, labels: {{app: {label}}}}}
spec:
  model: {{source: {model}}}
  policy: policy-{policy}
  traffic: [{{from: eu-west, rate: 120/s}}, {{from: eu-east, rate: 6/m}}]
"""


WHAT_IF = """apiVersion: shoal/v1
kind: Workload
metadata: {{name: can-move}}
spec: {{model: {{source: {model}}}}}
"""


@dataclass(frozen=True, slots=True)
class CatalogFigures:
    """Median milliseconds of one call in the catalog."""

    # Stored documents.
    documents: int
    # A plan of one changed workload.
    plan_ms: float
    # A plan of one changed policy.
    policy_ms: float
    # An apply of the workload: the plan, then what the region's step reads of the new documents.
    apply_ms: float
    # A can-move of a pushed model.
    can_move_ms: float
    # The plan of the workload, where every stored document was just loaded from the store.
    plan_anew_ms: float
    # Reading every stored document as YAML, with the positions of its fields.
    yaml_ms: float


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def workload(number: int, count: int, label: str) -> str:
    policies, tenants = max(1, count // 20), max(1, count // 50)
    return WORKLOAD.format(
        number=number, tenant=number % tenants, policy=1 + number % policies, model=digest(number % MODELS), label=label
    )


def stored_catalog(count: int) -> Catalog:
    """A catalogue of `count` documents, as applied."""
    policies, tenants = max(1, count // 20), max(1, count // 50)
    texts = [
        f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: {REGION}}}\nspec: {{price: 0.30 USD/h}}\n",
        *(POLICY.format(number=1 + number) for number in range(policies)),
        *(TENANT.format(number=number) for number in range(tenants)),
    ]
    texts += [workload(number, count, "a") for number in range(count - len(texts))]
    models = {name: ModelRecord(name, (), Wall(0.0), "", profile(name)) for name in map(digest, range(MODELS))}
    proposed = proposal(Catalog(models=models), *texts)
    assert len(proposed.documents) == count
    return proposed


def proposal(catalog: Catalog, *texts: str) -> Catalog:
    given = [(f"{number}.yaml", text) for number, text in enumerate(texts)]
    found = propose(catalog, given, {}, region=REGION, actor="", wall=Wall(1.0), verify=verify_bundle)
    assert not found.problems, found.problems[:3]
    return found.catalog


def read_as_placement(catalog: Catalog) -> None:
    """Everything that a step or a plan reads of a catalogue."""
    _ = catalog.intents, catalog.quotas, catalog.number, catalog.profiles, catalog.rtt_s, catalog.references
    _ = catalog.facts(REGION), catalog.rules(REGION), catalog.signatures(REGION, verify_bundle)


def plan(catalog: Catalog, text: str) -> Catalog:
    proposed = proposal(catalog, text)
    _ = proposed.intents  # in a thread beside the loop, then once more on it
    read_as_placement(proposed)
    return proposed


def apply(catalog: Catalog, text: str) -> None:
    applied = plan(catalog, text).with_changes(guests=catalog.guests)
    read_as_placement(applied)


def can_move(catalog: Catalog, text: str) -> None:
    _ = catalog.intents
    read_as_placement(catalog)
    _ = plan(catalog, text)


def loaded_again(catalog: Catalog) -> Catalog:
    documents = {key: codec.load(StoredDocument, codec.dump(each)) for key, each in catalog.documents.items()}
    return replace(catalog, documents=documents, earlier=None)


def measure(count: int, calls: int) -> CatalogFigures:
    catalog = stored_catalog(count)
    read_as_placement(catalog)
    workloads = [workload(0, count, f"b-{number}") for number in range(calls)]
    policies = [POLICY.format(number=1).replace("1.50 USD", f"1.{number:02} USD") for number in range(calls)]
    model = WHAT_IF.format(model=digest(0))
    texts = [(each.name, each.text) for each in catalog.documents.values()]
    return CatalogFigures(
        count,
        _median_ms(lambda text: plan(catalog, text), workloads),
        _median_ms(lambda text: plan(catalog, text), policies),
        _median_ms(lambda text: apply(catalog, text), workloads),
        _median_ms(lambda text: can_move(catalog, text), [model] * calls),
        _median_ms(lambda fresh: plan(fresh, workloads[0]), [loaded_again(catalog) for _ in range(ANEW)]),
        _median_ms(load, [texts] * ANEW),
    )


def _median_ms(work: Callable[[Given], object], given: Sequence[Given]) -> float:
    took = []
    for each in given:
        began = time.process_time()
        work(each)
        took.append(time.process_time() - began)
    return statistics.median(took) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = [measure(count, arguments.calls) for count in arguments.documents]
    if arguments.json:
        print(json.dumps([asdict(each) for each in figures], indent=1))
        return
    columns = f"{'plan':>9} {'policy':>9} {'apply':>9} {'can-move':>9} {'plan anew':>10} {'YAML':>9}"
    print(f"{'documents':>9} {columns}   plan anew to plan")
    for each in figures:
        print(
            f"{each.documents:9} {each.plan_ms:6.1f} ms {each.policy_ms:6.1f} ms {each.apply_ms:6.1f} ms "
            f"{each.can_move_ms:6.1f} ms {each.plan_anew_ms:7.1f} ms {each.yaml_ms:6.1f} ms   "
            f"{each.plan_anew_ms / each.plan_ms:.1f}"
        )


if __name__ == "__main__":
    main()
