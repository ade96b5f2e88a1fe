"""`shoal plan` of every example policy and every template by need, with small models in place of those that they name:
the region takes the documents, and says of each replica where it goes or why it goes nowhere."""

import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from harness.cluster.stack import DevStack
from harness.models.speech import DETECTOR
from harness.models.synthetic import padded_model
from shoal.policies.templates import NEEDS, need_template

EXAMPLES: Final = sorted((Path(__file__).parents[3] / "policies" / "examples").glob("*.yaml"))


def write_models(folder: Path, text: str) -> None:
    """Each its own bytes, so that no two are the same model."""
    for number, name in enumerate(sorted({*re.findall(r"\./(models/[\w.-]+\.onnx)", text)}), 1):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(DETECTOR.read_bytes() if "silero" in name else padded_model(number * 1000))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_region_plans_the_example(stack: DevStack, tmp_path: Path, example: Path) -> None:
    text = example.read_text()
    write_models(tmp_path, text)
    asked = tmp_path / example.name
    asked.write_text(text)
    planned = stack.shoal("plan", "-f", str(asked))
    assert planned.returncode == 1, planned.stderr or planned.stdout
    for each in yaml.safe_load_all(text):
        if each["kind"] == "Workload":
            name = f"{each['metadata'].get('tenant', 'default')}/{each['metadata']['name']}"
            assert re.search(rf"^{name} +\d of \d placed", planned.stdout, re.MULTILINE), planned.stdout


def test_a_region_plans_every_template_by_need(stack: DevStack, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(padded_model(1))
    for need in NEEDS:
        (tmp_path / f"{need}.yaml").write_text(need_template(need))
    planned = stack.shoal("plan", "-f", str(tmp_path))
    assert planned.returncode == 1, planned.stderr or planned.stdout
    for need in NEEDS:
        assert re.search(rf"^default/{need} +\d of \d placed", planned.stdout, re.MULTILINE), planned.stdout
