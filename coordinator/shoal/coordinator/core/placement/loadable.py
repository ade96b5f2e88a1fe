"""Whether a runtime can load a model at all, according to what the runtime reports about itself."""

from typing import Final

from shoal.types.codes import Code, Refusal
from shoal.types.profile import ModelProfile
from shoal.types.receipt import RuntimeSupport

_OPERATORS_SHOWN: Final = 8
"""Operators that one message names."""


def load_refusal(profile: ModelProfile, runtime: RuntimeSupport, version: str) -> Refusal | None:
    """Why the runtime cannot load the model; None where nothing prevents it. version: the runtime's, as its device
    reports it. What the runtime does not report refuses nothing."""
    if 0 < runtime.ir_version < profile.ir_version:
        return Refusal(
            Code.IR_UNSUPPORTED, f"{version} reads IR up to {runtime.ir_version}", f"IR version {profile.ir_version}"
        )
    for domain, opset in sorted(profile.domains.items()):
        if (newest := runtime.opsets.get(domain, opset)) < opset:
            return Refusal(
                Code.OPSET_UNSUPPORTED, f"{version} has opset {newest} of {domain}", f"opset {opset} of {domain}"
            )
    kernels = {kernel.operator: kernel for kernel in runtime.kernels}
    missing = [
        f"{name}({definition})"
        for name, definition in sorted(profile.definitions.items())
        if kernels and (name not in kernels or not kernels[name].computes(definition))
    ]
    if missing:
        found = f"{version} has no kernel for {', '.join(missing[:_OPERATORS_SHOWN])}"
        return Refusal(Code.OP_UNSUPPORTED, found, "every operator of the model")
    return None
