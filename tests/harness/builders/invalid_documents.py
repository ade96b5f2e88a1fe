"""Policy documents with one mistake each, and the code and remedy that it gets. `§` marks the place to be named."""

from typing import Final

from shoal.types.codes import Code

MARK: Final = "§"


def policy(spec: str, name: str = "p") -> str:
    return f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec:\n{spec}"


def workload(spec: str, metadata: str = "{name: w}") -> str:
    return f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {metadata}\nspec:\n  model: {{source: ./m.onnx}}\n{spec}"


def region(spec: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: r}}\nspec:\n{spec}"


def split_at_mark(text: str) -> tuple[str, int, int]:
    """The text without its mark, and the mark's line and column."""
    before, _, after = text.partition(MARK)
    return before + after, before.count("\n") + 1, len(before) - before.rfind("\n")


KEY: Final = "MCowBQYDK2VwAyEAR8bBk5m5Z9m3n3JpVr4aI1QYyQxgkqf6I8vQm3m5v0E="

MISTAKES: Final = [
    # the file
    ("tab", "a:\n§\tb: 1\n", Code.YAML_INVALID, "replace each tab by spaces"),
    ("unclosed", "a: [1\nb§: 2\n", Code.YAML_INVALID, "indentation"),
    ("not a mapping", "§- a\n- b\n", Code.YAML_INVALID, "apiVersion"),
    ("nul", "a: §\0\n", Code.YAML_INVALID, "remove"),
    ("unknown alias", "a: §*b\n", Code.YAML_INVALID, "&NAME"),
    ("key twice", "a: 1\nb: 2\n§a: 3\n", Code.YAML_DUPLICATE_KEY, "remove one"),
    ("tag", "a: §!!python/name:os.system x\n", Code.YAML_TAG_DENIED, "remove the tag"),
    ("no apiVersion", "§kind: Policy\nmetadata: {name: p}\n", Code.FIELD_MISSING, "apiVersion: shoal/v1"),
    ("wrong apiVersion", "apiVersion: §v1\nkind: Policy\nmetadata: {name: p}\n", Code.API_VERSION_UNKNOWN, "shoal/v1"),
    ("no kind", "§apiVersion: shoal/v1\nmetadata: {name: p}\n", Code.FIELD_MISSING, "kind: Policy"),
    (
        "wrong kind",
        "apiVersion: shoal/v1\nkind: §Polcy\nmetadata: {name: p}\n",
        Code.KIND_UNKNOWN,
        "did you mean Policy",
    ),
    # fields
    ("unknown field", policy("  require: {§latancy: {p95: 1s}}\n"), Code.FIELD_UNKNOWN, "did you mean latency"),
    (
        "unknown field, deep",
        policy("  require: {latency: {p95: 1s}}\n  relax: [{latency: {p95: 2s, §p96: 1s}}]\n"),
        Code.FIELD_UNKNOWN,
        "did you mean p95",
    ),
    ("merge key", policy("  §<<: {priority: 1}\n"), Code.FIELD_UNKNOWN, "one of"),
    (
        "missing name",
        "apiVersion: shoal/v1\nkind: Workload\n§metadata: {tenant: t}\nspec: {model: {source: a}}\n",
        Code.FIELD_MISSING,
        "add name",
    ),
    ("missing metadata", "§apiVersion: shoal/v1\nkind: Tenant\n", Code.FIELD_MISSING, "add metadata"),
    ("missing p95", policy("  require: {§latency: {from: origin}}\n"), Code.FIELD_MISSING, "add p95"),
    ("bad name", policy("  priority: 1\n", name="§My_Policy"), Code.NAME_INVALID, "lower case"),
    ("name that starts with a hyphen", policy("  priority: 1\n", name="§-x"), Code.NAME_INVALID, "between"),
    ("name that ends with a hyphen", policy("  priority: 1\n", name="§a-"), Code.NAME_INVALID, "between"),
    ("number as name", policy("  priority: 1\n", name="§7"), Code.NAME_INVALID, "quote"),
    (
        "wrong word",
        policy("  require: {availability: {spread: §nodes, replicas: 2}}\n"),
        Code.FIELD_INVALID,
        "mean node",
    ),
    (
        "spread over a word",
        policy("  require: {availability: {spread: {over: §node}, replicas: 2}}\n"),
        Code.FIELD_INVALID,
        "spread: node",
    ),
    (
        "a preference that is no expression",
        policy("  prefer: [§npu]\n"),
        Code.EXPRESSION_INVALID,
        "",
    ),
    ("per device", policy("  require: {availability: {per: §device}}\n"), Code.FIELD_INVALID, ""),
    ("text as number", policy('  priority: §"9"\n'), Code.FIELD_INVALID, "without quotes"),
    (
        "fraction as whole",
        policy("  require: {availability: {replicas: §1.5}}\n"),
        Code.FIELD_INVALID,
        "without quotes",
    ),
    ("zero replicas", policy("  require: {availability: {replicas: §0}}\n"), Code.FIELD_INVALID, "raise"),
    ("mapping as list", workload("  traffic: §{from: eu, rate: 1/s}\n"), Code.FIELD_INVALID, "- entry"),
    ("list as mapping", policy("  limits: §[1 USD/h]\n"), Code.FIELD_INVALID, "{name: value}"),
    ("no value", policy("  limits: {§cost: }\n"), Code.FIELD_INVALID, "give it a value"),
    ("infinite weight", policy("  optimize: {cost: §.inf}\n"), Code.FIELD_INVALID, ""),
    ("negative weight", policy("  optimize: {cost: §-1}\n"), Code.FIELD_INVALID, "raise"),
    (
        "list too long",
        policy(f"  require: {{residency: §[{', '.join(f'r{number}' for number in range(300))}]}}\n"),
        Code.FIELD_INVALID,
        "shorten",
    ),
    ("bool as label", workload("", "{name: w, labels: {a: §true}}"), Code.FIELD_INVALID, "quote"),
    # quantities
    ("no unit", policy("  require: {latency: {p95: §60}}\n"), Code.UNIT_MISSING, "20ms"),
    ("wrong unit", policy("  limits: {energy: §2 W}\n"), Code.UNIT_WRONG, "2.0 J/inference"),
    ("no quantity", policy("  partition: {serve: §for ever}\n"), Code.QUANTITY_INVALID, "20ms"),
    ("negative", policy("  limits: {cost: §-1 USD/h}\n"), Code.QUANTITY_INVALID, "1.50 USD/h"),
    ("a heartbeat too short", policy("  partition: {heartbeat: §100ms}\n"), Code.QUANTITY_INVALID, "raise it"),
    ("lost too soon", policy("  partition: {lost_after: §200ms}\n"), Code.QUANTITY_INVALID, "raise it"),
    ("longer than every date", policy("  scale: {to_zero_after: §4000000d}\n"), Code.QUANTITY_INVALID, "lower it"),
    ("mapping as quantity", policy("  require: {latency: {p95: §{a: 1}}}\n"), Code.QUANTITY_INVALID, "20ms"),
    # expressions
    ("unknown name", policy("  require: {where: '§device.knd == \"gpu\"'}\n"), Code.EXPRESSION_INVALID, "device.kind"),
    ("one =", policy("  require:\n    where: device.kind §= 'gpu'\n"), Code.EXPRESSION_INVALID, "=="),
    ("types", policy("  require:\n    where: device.memory_bytes §> 4.0\n"), Code.EXPRESSION_INVALID, "like with like"),
    ("not a truth", policy("  require:\n    where: §device.kind\n"), Code.EXPRESSION_INVALID, "compare it"),
    ("number as text", policy("  require:\n    where: §5\n"), Code.EXPRESSION_INVALID, "device.kind"),
    (
        "in a block",
        policy('  require:\n    where: |\n      device.kind == "gpu" &&\n        §node.nam == "a"\n'),
        Code.EXPRESSION_INVALID,
        "node.name",
    ),
    (
        "costly pattern",
        policy("  require:\n    where: node.name.matches(§'(a{9}){9}')\n"),
        Code.POLICY_COST,
        "simpler selector",
    ),
    # nothing acts on it yet
    (
        "margin of nothing",
        policy("  federation: {delegate: when-infeasible, margin: §10%}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "when-better",
    ),
    ("never to anyone", policy("  federation: {to: §[eu-*]}\n"), Code.FIELD_WITHOUT_EFFECT, "when to delegate"),
    (
        "margin of all",
        policy("  federation: {delegate: when-better, margin: §100%}\n"),
        Code.POLICY_UNREACHABLE,
        "lower",
    ),
    (
        "a share of nothing",
        region("  trade: [{with: eu-*, hold_share: §0%}]\n"),
        Code.POLICY_UNREACHABLE,
        "write a share",
    ),
    ("region's coordinates", region("  location: {§lat: 48.9}\n"), Code.NOT_SUPPORTED_YET, "remove"),
    (
        "a failure of nothing",
        policy("  migration: {verify: {against: none, on_fail: §continue}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "remove it",
    ),
    ("a gap without a reference", policy("  migration: {allow_gap: §5s}\n"), Code.POLICY_UNREACHABLE, "recorded"),
    (
        "captured inputs for a reference",
        policy("  migration: {verify: {against: reference, inputs: §captured}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "never",
    ),
    (
        "days of no week",
        policy("  migration: {windows: [{days: §mon-fry, from: 20:00, to: 06:00, zone: UTC}]}\n"),
        Code.FIELD_INVALID,
        "mon-fri",
    ),
    (
        "no time of day",
        policy("  migration: {windows: [{days: mon, from: §25:00, to: 06:00, zone: UTC}]}\n"),
        Code.FIELD_INVALID,
        "20:00",
    ),
    (
        "a time as a number",
        policy("  migration: {windows: [{days: mon, from: 20:00, to: §6, zone: UTC}]}\n"),
        Code.FIELD_INVALID,
        "20:00",
    ),
    (
        "a zone misspelt",
        policy("  migration: {windows: [{days: mon, from: 20:00, to: 06:00, zone: §Europe/Pariss}]}\n"),
        Code.FIELD_INVALID,
        "did you mean Europe/Paris",
    ),
    (
        "a zone that is a path",
        policy("  migration: {windows: [{days: mon, from: 20:00, to: 06:00, zone: §../UTC}]}\n"),
        Code.FIELD_INVALID,
        "UTC",
    ),
    (
        "a window of no length",
        policy("  migration: {windows: [{days: mon, from: 06:00, to: §06:00, zone: UTC}]}\n"),
        Code.POLICY_UNREACHABLE,
        "24:00",
    ),
    ("a long drain", policy("  migration: {drain: §45s}\n"), Code.POLICY_UNREACHABLE, "lower"),
    ("a drain of nothing", policy("  migration: {drain: §0s}\n"), Code.POLICY_UNREACHABLE, "raise it"),
    ("steps back", policy("  migration: {shift: {steps: §[50%, 25%, 100%]}}\n"), Code.POLICY_UNREACHABLE, "in order"),
    ("steps to nowhere", policy("  migration: {shift: {steps: §[5%, 50%]}}\n"), Code.POLICY_UNREACHABLE, "100%"),
    (
        "a guard that lets all fail",
        policy("  migration: {shift: {steps: [100%], guard: {errors: §100%}}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "lower",
    ),
    (
        "a guard that lets nothing pass",
        policy("  migration: {shift: {steps: [100%], guard: {p95: §0x}}}\n"),
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    (
        "a schedule of candidates",
        policy('  schedule: [{when: §device.kind == "npu", optimize: {cost: 1}}]\n'),
        Code.EXPRESSION_INVALID,
        "leave it out",
    ),
    (
        "a schedule for ever",
        policy("  schedule: [{when: §1 < 2, optimize: {cost: 1}}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "hour(now",
    ),
    (
        "a schedule without an objective",
        policy("  schedule: [{when: 'hour(now, \"UTC\") > 1', optimize: §{cost: 0}}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "give one a weight",
    ),
    (
        "a zone of nowhere",
        policy("  schedule: [{when: §'hour(now, \"Europe/Pari\") > 1', optimize: {cost: 1}}]\n"),
        Code.EXPRESSION_INVALID,
        "has(..)",
    ),
    ("no carbon at all", policy("  limits: {carbon: §0 gCO2/h}\n"), Code.POLICY_UNREACHABLE, "raise it"),
    ("node power", policy("  limits: {node_power: §15}\n"), Code.UNIT_MISSING, "15W"),
    (
        "nothing that can be prepared",
        policy("  require: {precision: {allow: [fp32, bf16], prepare: §true}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "allow it",
    ),
    (
        "a tolerance without its bound",
        policy("  require: {precision: {allow: [int8], tolerance: {metric: §cosine}}}\n"),
        Code.FIELD_MISSING,
        "at_least",
    ),
    (
        "a bound that the metric has not",
        policy("  require: {precision: {allow: [int8], tolerance: {metric: cosine, at_most: §0.9}}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "at_least",
    ),
    (
        "a likeness above 1",
        policy("  require: {precision: {allow: [int8], tolerance: {metric: top_k, at_least: §1.5}}}\n"),
        Code.POLICY_UNREACHABLE,
        "nothing can meet it",
    ),
    (
        "signed model by a key twice",
        policy("  require: {trust: {signed_model: {keys: [a, §a]}}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "remove",
    ),
    (
        "key that is none",
        region("  keys: [{name: a, key: §MCowBQYDK2VwAyEA}]\n"),
        Code.FIELD_INVALID,
        "shoal model key",
    ),
    (
        "key of no day",
        region(f"  keys: [{{name: a, key: {KEY}, until: §soon}}]\n"),
        Code.FIELD_INVALID,
        "2027-12-31",
    ),
    (
        "the last day of all",
        region(f"  keys: [{{name: a, key: {KEY}, until: §'9999-12-31'}}]\n"),
        Code.FIELD_INVALID,
        "2027-12-31",
    ),
    ("delay without a batch", workload("  batching: {delay: §5ms}\n"), Code.FIELD_WITHOUT_EFFECT, "give max"),
    ("padding without a batch", workload("  batching: {padding: §true}\n"), Code.FIELD_WITHOUT_EFFECT, "give max"),
    (
        "batches of sessions",
        workload("  batching: {max: §16}\n  session: {state: {h: hn}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "remove batching",
    ),
    ("no consent", workload("  capture: {consent: false, max: §16}\n"), Code.FIELD_WITHOUT_EFFECT, "consent: true"),
    ("state twice", workload("  session: {state: §{h: hn, c: hn}}\n"), Code.SESSION_INVALID, "name the pairs"),
    (
        "source to fetch",
        "apiVersion: shoal/v1\nkind: Workload\nmetadata: {name: w}\n"
        "spec: {model: {source: a, variants: [{source: b}, {source: §https://models.example/c.onnx}]}}\n",
        Code.NOT_SUPPORTED_YET,
        "fetch it",
    ),
    (
        "price that is always stale",
        region("  price: {source: ./p.csv, stale_after: §0s}\n"),
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    ("carbon of no unit", region("  carbon: {source: ./c.csv, fallback: §350}\n"), Code.UNIT_MISSING, "gCO2/kWh"),
    (
        "tenant budget of nothing",
        "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t}\nspec: {quota: {cost: §0 USD/h}}\n",
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    (
        "tenant weight of nothing",
        "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t}\nspec: {weight: §0}\n",
        Code.FIELD_INVALID,
        "raise",
    ),
    (
        "tenant rate of nothing",
        "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t}\nspec: {quota: {rate: §0/s}}\n",
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    (
        "tenant concurrency of nothing",
        "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t}\nspec: {quota: {concurrency: §0}}\n",
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    # can never be met
    ("zero cost", policy("  limits: {cost: §0 USD/h}\n"), Code.POLICY_UNREACHABLE, "raise"),
    ("zero idle", policy("  scale: {to_zero_after: §0s}\n"), Code.POLICY_UNREACHABLE, "raise"),
    ("zero latency", policy("  require: {latency: {p95: §0ms}}\n"), Code.POLICY_UNREACHABLE, "raise"),
    (
        "two replicas, one node",
        policy("  require:\n    where: node.name == 'a'\n    availability: {replicas: §2, spread: node}\n"),
        Code.POLICY_UNREACHABLE,
        "widen where",
    ),
    (
        "three replicas, two nodes",
        policy("  require:\n    where: node.name in ['a', 'b']\n    availability: {replicas: §3, spread: node}\n"),
        Code.POLICY_UNREACHABLE,
        "widen where",
    ),
    (
        "three sites, two nodes",
        policy(
            "  require:\n    where: node.name in ['a', 'b']\n    availability: {replicas: §3, spread: {over: site}}\n"
        ),
        Code.POLICY_UNREACHABLE,
        "widen where",
    ),
    *(
        (
            f"{name} beside per",
            policy(f"  require: {{availability: {{per: node, {field}}}}}\n"),
            Code.POLICY_UNREACHABLE,
            "or per",
        )
        for name, field in (
            ("replicas", "replicas: §2"),
            ("spread", "spread: §node"),
            ("standby", "standby: §warm"),
        )
    ),
    (
        "another number beside per in a step",
        policy("  require: {availability: {per: node}}\n  relax: [{availability: §{replicas: 1}}]\n"),
        Code.POLICY_UNREACHABLE,
        "not per",
    ),
    (
        "another region beside per",
        policy("  require: {availability: {per: node}}\n  federation: {delegate: §when-infeasible}\n"),
        Code.POLICY_UNREACHABLE,
        "delegate: never",
    ),
    ("prefer nothing", policy("  prefer: [§'false']\n"), Code.POLICY_UNREACHABLE, "correct it"),
    (
        "a stronger spread in a step",
        policy(
            "  require: {availability: {replicas: 2, spread: node}}\n"
            "  relax: [{availability: {spread: §{over: site}}}]\n"
        ),
        Code.POLICY_UNREACHABLE,
        "weaker spread",
    ),
    (
        "recovery before loss is known",
        policy("  require: {availability: {recovery: §5s}}\n"),
        Code.POLICY_UNREACHABLE,
        "2 replicas",
    ),
    (
        "lost at the first late beat",
        policy("  partition: {heartbeat: 5s, lost_after: §6s}\n"),
        Code.POLICY_UNREACHABLE,
        "raise lost_after",
    ),
    ("never true", policy("  require:\n    where: §1 == 2\n"), Code.POLICY_UNREACHABLE, "name node"),
    (
        "relax tightens",
        policy("  require: {latency: {p95: 60ms}}\n  relax: [{latency: {p95: §50ms}}]\n"),
        Code.POLICY_UNREACHABLE,
        "longer",
    ),
    (
        "relax tightens the step before",
        policy("  limits: {cost: 1 USD/h}\n  relax: [{limits: {cost: 3 USD/h}}, {limits: {cost: §2 USD/h}}]\n"),
        Code.POLICY_UNREACHABLE,
        "higher",
    ),
    ("relax bounds", policy("  relax: [{limits: {energy: §2 J/inference}}]\n"), Code.POLICY_UNREACHABLE, "remove"),
    (
        "relax to other precisions",
        policy("  require: {precision: {allow: [fp32]}}\n  relax: [{precision: {allow: §[int8]}}]\n"),
        Code.POLICY_UNREACHABLE,
        "and more",
    ),
    (
        "a peak at no time",
        workload("  traffic: [{from: a, rate: 9/s, peak: §10/s}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "when",
    ),
    (
        "a time without a peak",
        workload("  traffic: [{from: a, rate: 9/s, when: §'hour(now, \"UTC\") > 8'}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "how much",
    ),
    (
        "quota of nothing",
        "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t}\nspec: {quota: {memory: §0B}}\n",
        Code.POLICY_UNREACHABLE,
        "raise",
    ),
    # changes nothing
    ("weights of zero", policy("  optimize: §{energy: 0, cost: 0}\n"), Code.FIELD_WITHOUT_EFFECT, "give one a weight"),
    ("empty", policy("  §limits: {}\n"), Code.FIELD_WITHOUT_EFFECT, "remove"),
    ("empty list", policy("  require: {§residency: []}\n"), Code.FIELD_WITHOUT_EFFECT, "remove"),
    ("always true", policy("  require:\n    where: §'true'\n"), Code.FIELD_WITHOUT_EFFECT, "remove where"),
    (
        "relax to the same",
        policy("  require: {latency: {p95: 60ms}}\n  relax: [{latency: {p95: §0.06s}}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "change or remove",
    ),
    (
        "spread of one",
        policy("  require: {availability: {spread: §node}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "raise replicas",
    ),
    (
        "precision twice",
        policy("  require: {precision: {allow: [fp32, §fp32]}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "remove",
    ),
    (
        "spread over a label, of one",
        policy("  require: {availability: {spread: §{over: site}}}\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "raise replicas",
    ),
    (
        "prefer everything",
        policy("  prefer: [§'true']\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "comes last",
    ),
    (
        "prefer the same twice",
        policy("  prefer: [device.kind == 'npu', §device.kind == 'npu']\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "remove",
    ),
    (
        "variant twice",
        "apiVersion: shoal/v1\nkind: Workload\nmetadata: {name: w}\n"
        "spec: {model: {source: a, variants: [{source: §a}]}}\n",
        Code.FIELD_WITHOUT_EFFECT,
        "remove the variant",
    ),
    ("no traffic", workload("  traffic: [{from: a, rate: §0/s}]\n"), Code.FIELD_WITHOUT_EFFECT, "remove"),
    (
        "origin twice",
        workload("  traffic: [{from: a, rate: 1/s}, {from: §a, rate: 2/s}]\n"),
        Code.FIELD_WITHOUT_EFFECT,
        "add the rates",
    ),
    # names used twice
    (
        "name twice",
        policy("  priority: 1\n") + "---\n" + policy("  priority: 2\n", name="§p"),
        Code.NAME_DUPLICATE,
        "rename",
    ),
]
"""(what is wrong, text, code, part of the remedy)"""
