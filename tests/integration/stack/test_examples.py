"""`shoal plan` of every template by need, with a small model in place of those that they name: the region takes the
documents, and says of each replica where it goes or why it goes nowhere. Of examples: `../test_pages.py`."""

import re
from pathlib import Path

from harness.cluster.stack import DevStack
from harness.models.synthetic import padded_model
from shoal.policies.templates import NEEDS, need_template


def test_a_region_plans_every_template_by_need(stack: DevStack, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(padded_model(1))
    for need in NEEDS:
        (tmp_path / f"{need}.yaml").write_text(need_template(need))
    planned = stack.shoal("plan", "-f", str(tmp_path))
    assert planned.returncode == 1, planned.stderr or planned.stdout
    for need in NEEDS:
        assert re.search(rf"^default/{need} +\d of \d placed", planned.stdout, re.MULTILINE), planned.stdout
