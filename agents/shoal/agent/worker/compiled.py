"""The compiled form of a model for one device: an ONNX graph whose nodes are the provider's own code (EPContext).

A provider of an NPU compiles a graph at each load, which takes the longer the larger it is; of the compiled form a load
takes milliseconds. It fits one version of provider and runtime, and one device with its options.
"""

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from shoal.agent.worker.engine import load_refusal, session_options, without_outer_weights
from shoal.agent.worker.providers import Provider, add_provider, partition
from shoal.agent.worker.shapes import fix_shapes
from shoal.types.codes import Code, ShoalError, refuse


def compile_model(
    data: bytes, provider: Provider, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[str, ...]:
    """Write the compiled form of the model to `path`, which must not exist. Returns the operators that the provider
    took. `shapes`: as `fix_shapes` takes them.

    Raises ShoalError(OP_UNSUPPORTED) if the provider leaves nodes to others: they would be judged at the load, by what
    the compiled form no longer tells. Raises what a load raises.
    """
    options = without_outer_weights(session_options(provider.threads))
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_embed_mode", "1")
    options.add_session_config_entry("ep.context_file_path", str(path))
    try:
        session = ort.InferenceSession(
            fix_shapes(data, shapes), options, providers=add_provider(options, provider), enable_fallback=0
        )
        found = partition(session, provider.name)
    except ShoalError:
        raise
    except Exception as error:
        raise ShoalError(load_refusal(error)) from error
    if found.left or not path.exists():
        raise refuse(Code.OP_UNSUPPORTED, f"{sum(found.left.values())} nodes that others compute", "a whole graph", "")
    return tuple(sorted(found.taken))
