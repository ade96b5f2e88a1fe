"""F52: a provider that takes part of a graph, or none of it, serves nothing as the device's."""

import json
import platform
import subprocess
import sys
from typing import Any

import onnx
import pytest

from harness.measure.partitions import devices
from harness.report import record
from shoal.types.codes import Code

STEP = 5
"""Of 1,884 models, one in so many."""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="no plugin is installed for this processor")


def is_function(operator: str) -> bool:
    """Whether ONNX defines it by other operators, which the runtime then names."""
    if not onnx.defs.has(operator):
        return False
    schema: Any = onnx.defs.get_schema(operator)
    return bool(schema.has_function or schema.has_context_dependent_function)


def test_f52_none_that_the_partitioner_splits_is_served() -> None:
    """Over several hundred models: a worker serves those that the runtime's own strict option opens, and no other; the
    receipt learns no operator that the model does not have."""
    found = {device.name: device for device in devices().discover()}
    assert "htp-sim" in found
    for name in found:
        command = [sys.executable, "-m", "harness.measure.partitions", name, str(STEP)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        models = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        served = [each for each in models if each["served"]]
        assert len(models) >= 200
        assert [each["name"] for each in models if each["served"] is not each["strict"]] == []
        refused = {each["code"] for each in models if not each["served"]}
        assert Code.OP_UNSUPPORTED in refused
        assert refused <= {Code.OP_UNSUPPORTED, Code.SHAPES_OPEN, Code.LOAD_FAILED, Code.OPSET_UNSUPPORTED}
        alone = [
            each
            for each in models
            if "leaves 1 of 1 nodes" in each["found"] and len(each["graph"]) == 1 and not is_function(each["graph"][0])
        ]
        assert alone
        assert [each["name"] for each in alone if not each["found"].endswith(each["graph"][0])] == []
        record("F52", "P", 1, device=name, models=len(models), served=len(served), refused=len(models) - len(served))
