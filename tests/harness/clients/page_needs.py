"""What the pages of the docs take for granted, and what a reader types in place of a name that only the docs have.

In braces is what a region has: `VALUES` of `tests/integration/test_pages.py` looks it up."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Needs:
    """What a page takes for granted, and what a reader types in place of its names."""

    # Commands before the page.
    before: tuple[str, ...] = ()
    # Pattern -> what is typed instead.
    instead: tuple[tuple[str, str], ...] = ()
    # Commands behind the page, so that the next one finds the region of the tutorial.
    after: tuple[str, ...] = ()


JOINED: Final = (
    "rm -rf agent; mkdir agent",
    "shoal token create --role agent --name kiosk-7",
    "SHOAL_TOKEN=... shoal-agent join --coordinator HOST:7444 --state-dir agent",
)
"""A device of the reader's own."""
OLD_DEVICE: Final = ("shoal node revoke kiosk-7 --reason done", "shoal delete node kiosk-7")
LISTEN: Final = (
    "--link 127.0.0.1:0 --enrol 127.0.0.1:0 --metrics 127.0.0.1:0 --dashboard off"
    " --peers 127.0.0.1:0 --models 127.0.0.1:0"
)
"""Where a coordinator of the reader's own listens."""
KEPT: Final = frozenset(("reader", "archive"))
"""Workloads that the tutorial leaves; the others of a page are deleted behind it."""

SAMPLES: Final = (
    """python -c "import numpy as np; x = np.random.default_rng(7).random((8, 3, 48, 320), np.float32); """
    """np.savez('reader.npz', x=x)\""""
)
"""Eight lines of a picture."""

NEEDS: Final = {
    "README.md": Needs(before=("rm -rf agent",), after=OLD_DEVICE),
    "docs/coming-from/triton.md": Needs(
        before=(
            "mkdir -p model_repository/classifier/1",
            "cp policies/examples/models/labels.onnx model_repository/classifier/1/model.onnx",
            "shoal model push model_repository/classifier/1/model.onnx --name classifier",
        ),
    ),
    "docs/guides/broker.md": Needs(
        instead=((r"/var/lib/shoal\b(?!-)", "{coordinator}"), (r"/var/lib/shoal-broker", "broker"))
    ),
    "docs/guides/dashboard.md": Needs(
        instead=(
            (r"127\.0\.0\.1:7448", "{dashboard}"),
            (r" (ca|cert|key)\.pem", r" {operator}/\1.pem"),
            (r"8888", "{port}"),
        ),
    ),
    "docs/guides/devices.md": Needs(before=("cp $M/ch_ppocr_mobile_v2.0_cls_infer.onnx cls.onnx",)),
    "docs/guides/federation.md": Needs(
        before=("shoal federation leave",),
        instead=(
            (r"/var/lib/shoal-fed", "fed"),
            (r"--context fed\b", "--context dev-federation"),
            (r"\b(paris|lyon)\b", "home"),
            (r"shoal-join\.fed\.\.\.", "{token}"),
            (r"(?<=--federation )\S+", "{federation}"),
        ),
    ),
    "docs/guides/hardening.md": Needs(
        instead=((r"^shoal-agent doctor", "shoal-agent doctor --state-dir {dev}/plain-cpu"),)
    ),
    "docs/guides/identity.md": Needs(
        before=(
            "rm -rf agent",
            "shoal token create --role operator --name ana",
            "SHOAL_HOME=ana SHOAL_TOKEN=... shoal context login --coordinator HOST:7444",
            "shoal token create --role operator --name bea",
            "SHOAL_HOME=bea SHOAL_TOKEN=... shoal context login --coordinator HOST:7444",
        ),
        instead=(
            (r"\bDATA_DIR\b", "{coordinator}"),
            (r"shoal ca rotate$", "shoal ca rotate --wait 0s"),
            (r"--context fed\b", "--context dev-federation"),
        ),
    ),
    "docs/guides/inference.md": Needs(
        before=JOINED,
        instead=((r"HOST:8001", "{gateway}"), (r"--seconds 30", "--seconds 1"), (r"4,16", "4 --seconds 1")),
        after=OLD_DEVICE,
    ),
    "docs/guides/islands.md": Needs(before=JOINED, instead=((r"/var/lib/shoal-agent", "agent"),), after=OLD_DEVICE),
    "docs/guides/kubernetes.md": Needs(before=("rm -rf secrets",)),
    "docs/guides/migration.md": Needs(
        before=(
            "sed 's/reader/receipt-text/; s/frugal/receipts/' examples/reader.yaml > receipt.yaml",
            "sed -i 's/  optimize/  federation: {delegate: when-infeasible}\\n  optimize/' receipt.yaml",
            "shoal apply -f receipt.yaml --wait",
        ),
        instead=((r"\beu-east\b", "home-2"), (r"\beu-west\b", "home")),
        after=("shoal migrate reader --to edge-npu --watch",),
    ),
    "docs/guides/operating.md": Needs(
        before=("rm -rf agent",),
        instead=(
            (r"/var/lib/shoal/operator", "{operator} --coordinator {link}"),
            (r"/var/lib/shoal\b", "own-region"),
            (r"(--advertise) \S+", r"\1 localhost"),
            (r"\bFOLDER\b", "shop"),
        ),
        after=("shoal context use dev", "shoal context rm operator", "shoal context rm home", *OLD_DEVICE),
    ),
    # There is no second region to export anything.
    "docs/guides/prediction.md": Needs(instead=((r"^(shoal region measurements rm) eu\b", r"\1 home"),)),
    "docs/guides/signed-models.md": Needs(
        before=("rm -f shop-release.pem", "cp policies/examples/models/labels.onnx reader.onnx"),
        instead=(
            (r"MCowBQ[^,]+", "{key}"),
            (r"^shoal model push", "shoal apply -f block.yaml && shoal model push"),
        ),
        after=("shoal model rm reader", "rm reader.onnx*", "shoal apply -f home.yaml"),
    ),
    "docs/guides/sessions.md": Needs(
        before=("shoal model push policies/examples/models/silero_vad_16k.onnx --name silero-vad",),
    ),
    "docs/guides/stores.md": Needs(before=("rm -rf secrets",)),
    "docs/guides/traces.md": Needs(
        before=JOINED,
        instead=((r"shoal-coordinator run", "shoal-coordinator run --region other --data-dir other {listen}"),),
        after=OLD_DEVICE,
    ),
    "docs/guides/upgrades.md": Needs(
        before=(
            "sed 's/reader/receipt-text/; s/frugal/receipts/' examples/reader.yaml > receipt.yaml",
            "shoal apply -f receipt.yaml --wait",
            "sed -i 's/name: receipt-text/&, labels: {app: till}/' receipt.yaml",
            "cp policies/examples/models/ocr-rec*.onnx .",
        ),
    ),
    "docs/guides/verification.md": Needs(
        before=("cp $M/ch_PP-OCRv4_rec_infer.onnx reader.onnx", SAMPLES),
        after=("rm reader.onnx",),
    ),
    "docs/operations.md": Needs(
        instead=(
            (r"/etc/shoal/backup-key", "backup-key"),
            (r"/mnt/backups/eu", "archive"),
            (r"(?<!-)\bshoal-coordinator run \.\.", "shoal-coordinator run --region home --data-dir sealed {listen}"),
            (r"--region eu\b", "--region home"),
            (r"^shoal-coordinator restore", "cp -r {coordinator}/ca restored/ && shoal-coordinator restore"),
            (r"/var/lib/shoal \.\.", "restored {listen}"),
            (r"/var/lib/shoal\b", "restored"),
        ),
        before=("rm -rf restored sealed *.tar*; mkdir -p archive restored",),
    ),
    "docs/how-to/burst-to-another-region.md": Needs(
        before=(
            "shoal federation leave || true",
            "shoal token create --role region --name home --context dev-federation",
            "sed -i 's/eu-[*]/*/; s/ 300.s/ 3\\/s/' policies/examples/burst-to-another-region.yaml",
            "sed '/price:\\|carbon:\\|trade:/d' policies/examples/region.yaml > eu.yaml",
            """echo '  trade: [{with: "*", tenants: ["*"], hold_share: 50%}]' >> eu.yaml""",
            "shoal apply -f eu.yaml",
        ),
        after=("shoal apply -f home.yaml",),
        instead=(
            (
                r"shoal federation join --federation \S+",
                "SHOAL_TOKEN={token} shoal federation join --federation {federation}",
            ),
        ),
    ),
    "docs/how-to/batched-embeddings.md": Needs(instead=((r"16,64", "16,64 --seconds 1"),)),
    "docs/how-to/region.md": Needs(after=("shoal apply -f home.yaml",)),
    "docs/reference/fault-rows.md": Needs(instead=((r"--count 10000", "--count 1"),)),
}

COMMON: Final = (
    (r"^curl ", "curl --fail-with-body "),
    (r"0\.0\.0\.0:\d+|10\.0\.0\.1:\d+", "127.0.0.1:0"),
    (r"\b(HOST|coordinator\.example):7444", "{enrol}"),
    (r"(?<=SHOAL_TOKEN=)\.\.\.|(?<=--token )TOKEN", "{token}"),
    (r"\bm-[0-9a-f]{12}\b", "{migration}"),
    (r"\bt-[0-9a-f]{12}\b", "{negotiation}"),
    (r"\b4bf92f3577b34da6a3ce929d0e0e4736\b", "{trace}"),
    (r"metadata: \{name: (paris|eu-west)\}(?=\nspec:\n  (location|price|keys))", "metadata: {name: home}"),
    (r"shoal-agent run(?!.*--state-dir)", "shoal-agent run --state-dir agent --no-cpu --emulate rk3588s"),
    (r"shoal-agent join(?!.*--state-dir)", "shoal-agent join --state-dir agent"),
)
"""What a reader types for a name that only the docs have."""
