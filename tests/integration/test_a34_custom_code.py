"""A34: a model that brings foreign code or options into the runtime is refused, unless the operator allowed its
digest."""

from pathlib import Path

import pytest
from onnx import helper

from harness.models.push import push, push_refusal
from harness.models.synthetic import digest_of, model, relu, tensor
from shoal.coordinator.blobs.inspect import InspectionLimits
from shoal.coordinator.core.graph import Rules
from shoal.types.codes import Code
from shoal.types.profile import ModelProfile


def trusting(content: bytes) -> InspectionLimits:
    return InspectionLimits(rules=Rules(trusted_digests=frozenset({digest_of(content)})))


def using(domain: str, operator: str, **attributes: object) -> bytes:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain, **attributes)  # type: ignore[arg-type]
    made = model([node], [tensor("x", [1])], [tensor("y", [1])], domains={domain: 1})
    return bytes(made.SerializeToString())


def with_metadata(key: str) -> bytes:
    made = relu()
    helper.set_model_props(made, {key: '{"session_options": {"enable_profiling": 1}}'})
    return bytes(made.SerializeToString())


CASES = {
    "library": using("com.evil", "RunShell"),
    "extensions": using("ai.onnx.contrib", "StringRegexReplace"),
    "context": using("com.microsoft", "EPContext", embed_mode=1, ep_cache_context=b"\0compiled"),
    "python": using("com.microsoft", "PythonOp", func_name="f"),
    "config": with_metadata("ort_config"),
    "session": with_metadata("session.optimized_model_filepath"),
    "provider": with_metadata("ep.context_file_path"),
}


@pytest.mark.parametrize("case", CASES)
async def test_denied_unless_this_very_digest_is_trusted(tmp_path: Path, case: str) -> None:
    content = CASES[case]
    assert (await push_refusal(tmp_path, content)).code is Code.CUSTOM_OP_DENIED
    assert (await push_refusal(tmp_path, content, trusting(content + b" "))).code is Code.CUSTOM_OP_DENIED
    assert isinstance(await push(tmp_path, content, trusting(content)), ModelProfile)


async def test_a_context_that_names_a_file_is_refused_even_so(tmp_path: Path) -> None:
    content = using("com.microsoft", "EPContext", embed_mode=0, ep_cache_context=b"../context.bin")
    assert (await push_refusal(tmp_path, content, trusting(content))).code is Code.MODEL_PATH
