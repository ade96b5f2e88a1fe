"""What the examples of the command line's verbs take for granted, as `page_needs.py` has it of pages."""

from typing import Final

from harness.clients.page_needs import SAMPLES, Needs

READER: Final = "shoal apply -f examples/reader.yaml --wait"
"""As the tutorial leaves it; nothing to do if it is so."""
EXPORTED: Final = "shoal region measurements export eu.json"
"""Of the region `home`, which is the only one there."""
NO_LONGER_HOME: Final = ("shoal context use dev", "shoal context rm home")
"""`home` is the region's name, which a context gets that is added."""
MODEL: Final = "shoal model push reader.onnx"
KEY: Final = "rm -f publisher.p*; shoal model key publisher.pem --new"
SIGNED: Final = "shoal model sign reader.onnx --key publisher.pem --name reader --version 4"
UNSIGNED: Final = "rm reader.onnx.sig"
TRUST: Final = (
    r"printf 'apiVersion: shoal/v1\nkind: Region\nmetadata: {name: home}\nspec: {keys: [%s]}\n' "
    '"$(shoal model key publisher.pem)" > keys.yaml; shoal apply -f keys.yaml'
)
AWAY: Final = ("shoal drain edge-npu --watch", "shoal uncordon edge-npu")
"""Nothing moves where it is elsewhere already."""
TILL: Final = "sed 's/name: reader/&, labels: {app: till}/' examples/reader.yaml > till.yaml"
TRADED: Final = "sed 's/  optimize/  federation: {delegate: when-infeasible}\\n&/' examples/reader.yaml > traded.yaml"
SHOP: Final = 'sed "1,/^---/d; s/ reader/ shop-$shop/" examples/reader.yaml > many/$shop.yaml'
WORKS: Final = (
    "until shoal logs edge-npu --tail 1 && shoal status && shoal dev status | grep -q '^edge-npu  *worker '; "
    "do sleep 0.1; done"
)
"""A machine that was killed just before has its worker again. Until its agent says what each of its processes is, all
are listed as workers."""
WELL: Final = "until shoal status; do sleep 0.1; done"
"""What earlier examples deleted may still be finishing what is in flight."""
JOIN: Final = (
    "shoal token create --role region --name home --context dev-federation",
    "SHOAL_TOKEN=.. shoal federation join --federation fed.example:7444",
)

COMMON_NEEDS: Final = Needs(
    before=(
        "mkdir -p exported shops many ~/.config/fish/completions",
        "python -c \"import onnx; model = onnx.load('$M/ch_PP-OCRv4_rec_infer.onnx'); "
        "model.producer_name = 'a reader of their own'; onnx.save(model, 'reader.onnx'); "
        "onnx.save(model, 'exported/detector.onnx', save_as_external_data=True, location='weights.bin')\"",
        f"{SAMPLES}; mv reader.npz lines.npz",
        "cp examples/reader.yaml shops/",
        "cp -r /var/lib/shoal/operator operator",
        "rm -f region.tar support.tar.gz",
    ),
    instead=(
        (r"^shoal context add /var/lib/shoal/operator", r"shoal context add {operator} --coordinator {link}"),
        (r"/var/lib/shoal/operator", "{operator}"),
        (r"region\.example:7443", "{link}"),
        (r"region\.example:7444", "{enrol}"),
        (r"fed\.example:7444", "{federation}"),
        (r"8080", "{port}"),
        (r"SHOAL_TOKEN=\.\.(?!\.)", "SHOAL_TOKEN={token}"),
        (r"\bHASH\b", "{plan}"),
        (r"\bTRACE\b", "{trace}"),
        (r"--seconds 5", "--seconds 1"),
        (r"^shoal bench load (?!.*--seconds).*", r"\g<0> --seconds 1"),
        (r"^shoal bench --list", "(cd {checkout} && shoal bench --list)"),
    ),
)
"""Files that examples name, and what a reader types in place of names."""

EXAMPLE_NEEDS: Final = {
    "shoal dev break edge-npu/worker kill": Needs(before=(WORKS,), after=(WORKS, READER)),
    "shoal context add /var/lib/shoal/operator": Needs(after=NO_LONGER_HOME),
    "shoal context add operator --coordinator region.example:7443": Needs(after=NO_LONGER_HOME),
    "SHOAL_TOKEN=.. shoal context login --coordinator region.example:7444": Needs(
        before=("shoal token create --role operator --name ann",),
    ),
    "shoal context renew home": Needs(after=NO_LONGER_HOME),
    "shoal context rm old": Needs(
        before=("shoal context add /var/lib/shoal/operator --name old",), after=("shoal context use dev",)
    ),
    "cat mine.yaml | shoal plan -f -": Needs(before=("sed 's/ reader/ mine/' examples/reader.yaml > mine.yaml",)),
    "shoal apply -f examples/reader.yaml --plan HASH": Needs(before=(WELL, "shoal plan -f examples/reader.yaml")),
    "shoal delete workload reader": Needs(after=(READER,)),
    "shoal delete -f examples/reader.yaml": Needs(after=(READER,)),
    "shoal get nodes,devices -l site=shop-7": Needs(
        before=("shoal node label edge-npu site=shop-7",), after=("shoal node label edge-npu site-",)
    ),
    "shoal status": Needs(before=(WELL,)),
    "shoal model inspect reader": Needs(before=(MODEL,)),
    "shoal model rm reader": Needs(before=(MODEL,)),
    "shoal model clear reader": Needs(before=(MODEL,)),
    "shoal model clear reader --allow 3": Needs(
        before=(KEY, TRUST, SIGNED, MODEL), after=(UNSIGNED, "shoal model rm reader", "shoal apply -f home.yaml")
    ),
    "shoal model sign reader.onnx --key publisher.pem --version 4": Needs(before=(KEY,), after=(UNSIGNED,)),
    "shoal model verify reader.onnx --key publisher.pub": Needs(
        before=(KEY, SIGNED, "shoal model key publisher.pem --pem > publisher.pub"), after=(UNSIGNED,)
    ),
    "shoal model key publisher.pem --new": Needs(before=("rm -f publisher.p*",)),
    "shoal can-move reader --to edge-npu": Needs(before=AWAY),
    # To another place than it is at.
    "shoal can-move reader --to cloud-gpu/nvidia-l4": Needs(
        before=AWAY, instead=((r"cloud-gpu/nvidia-l4", "edge-npu/qualcomm-ai100-dm2"),)
    ),
    "shoal can-move reader --to home-2": Needs(before=(f"{TRADED}; shoal apply -f traded.yaml",), after=(READER,)),
    "shoal migrate reader --to edge-npu --watch": Needs(before=AWAY),
    # To another place than it is at, and one that takes nothing new for now.
    "shoal migrate reader --to edge-npu --queue": Needs(
        before=("shoal cordon cloud-gpu",), instead=((r"--to edge-npu", "--to cloud-gpu"),)
    ),
    "shoal migrate reader --cancel m-0123456789ab": Needs(after=("shoal uncordon cloud-gpu",)),
    "shoal drain edge-npu --watch": Needs(after=("shoal uncordon edge-npu",)),
    "shoal cordon edge-npu": Needs(after=("shoal uncordon edge-npu",)),
    "shoal rollback reader --dry-run": Needs(before=(f"{TILL}; shoal apply -f till.yaml", READER)),
    "shoal rollback reader --to 2 --wait": Needs(before=(f"{TILL}; shoal apply -f till.yaml", READER), after=(READER,)),
    "shoal node label edge-npu site=shop-7": Needs(after=("shoal node label edge-npu site-",)),
    "shoal node label edge-npu rack-": Needs(after=("shoal node label edge-npu site-",)),
    'shoal region set price "0.55 USD/h"': Needs(after=("shoal region set price --clear",)),
    "shoal region measurements import eu.json --dry-run": Needs(before=(EXPORTED,)),
    "shoal region measurements import eu.json": Needs(before=(EXPORTED,)),
    "shoal region measurements rm home": Needs(before=(EXPORTED, "shoal region measurements import eu.json")),
    "SHOAL_TOKEN=.. shoal federation join --federation fed.example:7444": Needs(
        before=("shoal federation leave --within 5m", JOIN[0])
    ),
    "shoal federation leave --within 5m": Needs(after=JOIN),
    "shoal restore region.tar --check": Needs(before=("rm -f region.tar; shoal backup region.tar --models",)),
    "shoal bench load shop-1 shop-2 --rate 2 --retries 3": Needs(
        before=(f"for shop in 1 2; do {SHOP}; done", "shoal apply -f many --wait"),
        after=("shoal delete workload shop-1 shop-2",),
    ),
}
"""Of single examples."""
LATER: Final = ("can-move", "migrate", "federation join", "federation leave", "ca", "ca rotate")
"""Verbs whose examples are typed behind the others, in this order: they go on from those, or change what is not undone.
Another CA comes last: it replaces the files that commands read."""
AT_THE_END: Final = ("shoal dev down", "shoal dev down --purge")
"""Examples that are typed behind the tutorial, and end the regions."""

NOT_TYPED: Final = {
    r"shoal demo( --keep)?": "takes both cores for two minutes; tests/integration/test_demo.py runs it",
    r"shoal dev up --link mqtt": "starts another stack, with a broker; tests/integration/mqtt has one",
    r"shoal dev up --fleet shop=40": "starts forty agents; tests/integration/test_forty_shops.py does so",
    r'eval "\$\(shoal completion zsh\)"': "needs zsh, which CI has not",
    r"shoal policy new --wizard": "asks somebody at a terminal; tests/unit/cli/test_policy_templates.py answers",
    r"shoal top": "needs a terminal; tests/unit/cli/test_top.py has one",
    r"shoal model push (https|oci|hf)://.*": "needs servers; tests/unit/cli/test_model_registries.py has some",
    r"shoal node settle edge-npu": "needs two agents with one identity; identity/test_duplicate_identity.py has them",
    r"shoal node release edge-npu": "needs a node in quarantine; simulations put some there",
    r"shoal upgrade --to 0\.2\.0 --wave 10%": "needs an installed release 0.2.0; test_f41_versions.py has two",
}
"""Pattern of examples that nobody can type in the tutorial's region -> why."""
