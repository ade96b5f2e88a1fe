"""What is shown under `Examples` in the help of each verb: (command line, what it does)."""

from collections.abc import Mapping
from typing import Final

from shoal.host.program_help import Example

FIRST: Final[tuple[Example, ...]] = (
    ("shoal dev up", "a region here, with emulated devices"),
    ("shoal model push reader.onnx", "put a model in"),
    ("shoal apply -f examples/reader.yaml --wait", "have it served"),
    ("shoal explain reader", "why it is where it is"),
    ("shoal infer reader --input line.npz", "ask it"),
)
"""Of `shoal` itself."""

EXAMPLES: Final[Mapping[str, tuple[Example, ...]]] = {
    "demo": (("shoal demo", "all of it, on this machine"), ("shoal demo --keep", "leave the regions running")),
    "dev": (("shoal dev up", "start"), ("shoal dev status", "what runs"), ("shoal dev down --purge", "stop, delete")),
    "dev up": (
        ("shoal dev up", "one region with four agents"),
        ("shoal dev up --regions 2 --federation-replicas 1", "two regions that trade"),
        ("shoal dev up --link mqtt", "agents behind a broker"),
        ("shoal dev up --fleet shop=40", "emulated shop-01 .. shop-40, each in a site of its own"),
    ),
    "dev status": (("shoal dev status -o wide", "with the data folders"),),
    "dev down": (("shoal dev down", "keep its state"), ("shoal dev down --purge", "delete it too")),
    "dev break": (
        ("shoal dev break edge-npu kill", "the machine dies"),
        ("shoal dev break edge-npu resume", "it comes back"),
        ("shoal dev break edge-npu/worker kill", "one process of it dies"),
    ),
    "dashboard": (
        ("shoal dashboard", "open it"),
        ("shoal dashboard --no-browser --port 8080", "print the link alone, for an ssh -L 8080:127.0.0.1:8080"),
    ),
    "context": (("shoal context ls", "which there are"), ("shoal context use dev", "call that one from now on")),
    "context ls": (("shoal context ls", "the one in use has a star"),),
    "context use": (("shoal context use dev", ""),),
    "context add": (
        ("shoal context add /var/lib/shoal/operator", "on the coordinator's machine, as its first operator"),
        ("shoal context add operator --coordinator region.example:7443", "with a copy of that folder"),
    ),
    "context login": (
        ("SHOAL_TOKEN=.. shoal context login --coordinator region.example:7444", "with an operator's token"),
    ),
    "context renew": (("shoal context renew", "the one in use"), ("shoal context renew home", "as login named it")),
    "context client": (("GATEWAY=$(shoal context client client)", "files in ./client, address in $GATEWAY"),),
    "context rm": (("shoal context rm old", ""),),
    "version": (("shoal version", ""), ("shoal version -o json", "for a bug report")),
    "completion": (
        ('eval "$(shoal completion bash)"', "in ~/.bashrc"),
        ('eval "$(shoal completion zsh)"', "in ~/.zshrc"),
        ("shoal completion fish > ~/.config/fish/completions/shoal.fish", ""),
    ),
    "policy": (
        ("shoal policy new --wizard", "answer some questions"),
        ("shoal policy new workload > mine.yaml", "a commented template"),
    ),
    "policy new": (
        ("shoal policy new --wizard", "questions, a check, a file"),
        ("shoal policy new --template cheapest --set model=reader", "by need, without asking"),
        ("shoal policy new workload > mine.yaml", "every field of a kind, as comments"),
    ),
    "policy schema": (("shoal policy schema > shoal.json", "for yaml-language-server and the like"),),
    "validate": (("shoal validate examples/reader.yaml", ""), ("shoal validate policies/", "every file below")),
    "plan": (
        ("shoal plan -f examples/reader.yaml", "what apply would do"),
        ("shoal plan", "what has drifted from what was applied"),
        ("cat mine.yaml | shoal plan -f -", "from standard input"),
    ),
    "apply": (
        ("shoal apply -f examples/reader.yaml --wait", "until it serves"),
        ("shoal apply -f examples/reader.yaml --plan HASH", "only if it is still what `plan` showed"),
        ("shoal apply -f shops/ --prune --dry-run", "what would be deleted too"),
        ("shoal apply -f shops/ --wave 10%", "one file alone, then a tenth of them at once"),
    ),
    "delete": (
        ("shoal delete workload reader", ""),
        ("shoal delete -f examples/reader.yaml", "what that file applied"),
    ),
    "get": (
        ("shoal get nodes", "every node, and whether it answers"),
        ("shoal get placements -o wide", "every column"),
        ("shoal get nodes,devices -l site=shop-7", "of the nodes with that label"),
        ("shoal get wl/reader -o yaml > reader.yaml", "as apply takes it"),
        ("shoal get pl --sort-by served -w", "stay, and draw it again"),
        ("shoal get no -o jsonpath='{.items[*].node.name}'", "one field of each"),
    ),
    "status": (("shoal status", "status 1 if something is not well"),),
    "top": (("shoal top", "1 to 6: tables, Enter: one row, q: end"),),
    "describe": (("shoal describe workload reader", ""), ("shoal describe node edge-npu", "")),
    "explain": (
        ("shoal explain reader", ""),
        ("shoal explain reader -o wide", "with the terms of each score"),
        ("shoal explain MEMORY_SHORT", "what a code means"),
    ),
    "events": (("shoal events", "the last 50"), ("shoal events -w --limit 5", "and those to come")),
    "trace": (("shoal trace m-0123456789ab", "a migration"), ("shoal trace TRACE -o wide", "with all attributes")),
    "logs": (("shoal logs edge-npu --tail 20", ""), ("shoal logs -f", "the coordinator's, as they come")),
    "infer": (
        ("shoal infer reader --input line.npz", ""),
        ("shoal infer reader --input line.npz --save answer.npz --trace", "keep the answer, and its spans"),
    ),
    "model": (("shoal model push reader.onnx", "put one in"), ("shoal model ls", "which there are")),
    "model inspect": (("shoal model inspect reader.onnx", "a file"), ("shoal model inspect reader", "a pushed one")),
    "model push": (
        ("shoal model push reader.onnx", "named reader"),
        ("shoal model push exported/ --name detector", "a folder, with external data"),
        ("shoal model push https://models.example/r.onnx --digest sha256:HEX", "from a URL"),
        ("shoal model push oci://registry.example/vision/reader@sha256:HEX", "from a registry, by manifest"),
        ("shoal model push hf://owner/reader@main/onnx/model.onnx --name reader", "from a model hub"),
        ("shoal model push reader.onnx --name ocr --samples lines.npz", "with inputs to warm up with"),
        ("shoal model push reader.onnx --shape x=1x3x48x480", "its usual size, to count costs at"),
    ),
    "model ls": (("shoal model ls -o wide", "who pushed them, and when"),),
    "model rm": (("shoal model rm reader", ""),),
    "model clear": (("shoal model clear reader", "try again what failed"), ("shoal model clear reader --allow 3", "")),
    "model sign": (("shoal model sign reader.onnx --key publisher.pem --version 4", "writes reader.onnx.sig"),),
    "model verify": (("shoal model verify reader.onnx --key publisher.pub", ""),),
    "model key": (
        ("shoal model key publisher.pem --new", "a new private key, and its line for the Region"),
        ("shoal model key publisher.pem --pem > publisher.pub", "the public one, for model verify"),
    ),
    "can-move": (
        ("shoal can-move reader --to edge-npu", "a node"),
        ("shoal can-move reader --to cloud-gpu/nvidia-l4", "a device"),
        ("shoal can-move reader --to home-2", "another region"),
    ),
    "migrate": (
        ("shoal migrate reader --to edge-npu --watch", "stage by stage"),
        ("shoal migrate reader --to edge-npu --queue", "when there is room"),
        ("shoal migrate reader --cancel m-0123456789ab", "take it back"),
    ),
    "drain": (("shoal drain edge-npu --watch", "until it is empty"),),
    "cordon": (("shoal cordon edge-npu", ""),),
    "uncordon": (("shoal uncordon edge-npu", ""),),
    "rollback": (("shoal rollback reader --dry-run", "what it would do"), ("shoal rollback reader --to 2 --wait", "")),
    "history": (("shoal history reader", ""), ("shoal history reader -o wide", "each field that changed")),
    "doctor": (("shoal doctor", "everything"), ("shoal doctor agent", "the nodes alone")),
    "token": (("shoal token create", "for one node, for one hour"),),
    "token create": (
        ("shoal token create --label site=shop-7", "a node that counts as of that site"),
        ("shoal token create --count 40 --group shops --valid 7d > join.txt", "a command for each of 40"),
        ("shoal token create --role operator --name ann", "for shoal context login"),
        ("shoal token create --role bearer --name shop --valid 30d", "for a tenant's clients"),
    ),
    "node": (("shoal node label edge-npu site=shop-7", ""), ("shoal node measure edge-npu", "")),
    "node revoke": (("shoal node revoke edge-npu --reason stolen --dry-run", "what would end with it"),),
    "node settle": (("shoal node settle edge-npu", "whoever has the session stays"),),
    "node release": (("shoal node release edge-npu", ""),),
    "node measure": (
        ("shoal node measure edge-npu", "every device"),
        ("shoal node measure edge-npu qualcomm-ai100-dm2", ""),
    ),
    "node label": (
        ("shoal node label edge-npu site=shop-7 rack=2", "set"),
        ("shoal node label edge-npu rack-", "remove"),
    ),
    "ca": (("shoal ca status", ""), ("shoal ca rotate", "")),
    "ca status": (("shoal ca status", ""),),
    "ca rotate": (("shoal ca rotate --wait 0s", "begin, and leave"),),
    "region": (('shoal region set price "0.55 USD/h"', ""),),
    "region set": (
        ('shoal region set carbon "410 gCO2/kWh"', "whatever the Region document says"),
        ("shoal region set carbon --clear", "the document counts again"),
    ),
    "region measurements": (
        ("shoal region measurements export eu.json", "in one region"),
        ("shoal region measurements import eu.json", "in another"),
    ),
    "region measurements export": (("shoal region measurements export eu.json", ""),),
    "region measurements import": (
        ("shoal region measurements import eu.json --dry-run", "what of it would count"),
        ("shoal region measurements import eu.json", ""),
    ),
    "region measurements ls": (("shoal region measurements ls", ""),),
    "region measurements rm": (("shoal region measurements rm home", ""),),
    "federation": (("shoal federation regions", "who is there"), ("shoal federation bids", "who offered what")),
    "federation join": (("SHOAL_TOKEN=.. shoal federation join --federation fed.example:7444", ""),),
    "federation leave": (("shoal federation leave --within 5m", "in good order"),),
    "federation regions": (("shoal federation regions -o wide", "with the classes of devices"),),
    "federation bids": (("shoal federation bids archive", "of one workload"),),
    "federation agreements": (("shoal federation agreements -o wide", ""),),
    "federation ledger": (("shoal federation ledger", ""),),
    "upgrade": (
        ("shoal upgrade --to 0.2.0 --dry-run", "which waves there would be"),
        ("shoal upgrade --to 0.2.0 --wave 10%", "agents, a tenth at a time"),
    ),
    "backup": (("shoal backup region.tar --models", ""),),
    "restore": (("shoal restore region.tar --check", "is it whole"),),
    "support-bundle": (("shoal support-bundle support.tar.gz", "no secrets are in it"),),
    "bench": (
        ("shoal bench load reader --seconds 5", "answers a second of a workload of yours"),
        ("shoal bench --list", "the others, in a checkout"),
    ),
    "bench load": (
        ("shoal bench load reader --in-flight 1,4,16", ""),
        ("shoal bench load reader --rate 50", ""),
        ("shoal bench load shop-1 shop-2 --rate 2 --retries 3", "in turn, as clients that ask again"),
    ),
}
"""Verb, with those above it -> its examples."""
