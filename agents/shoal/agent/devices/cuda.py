"""What ONNX Runtime's CUDA provider needs, whichever driver offers the device."""

from typing import Final

from shoal.agent.driver_port import DeviceAccess
from shoal.types.units import Bytes

PROVIDER: Final = "CUDAExecutionProvider"
_HOST_BYTES: Final = Bytes(4 * 2**30)
"""Twice the most that workers of one model each mapped on an H200 (driver 580.159.04, CUDA 13, cuDNN 9; VmData): 1.4 to
1.9 GiB. With less, CUDA says that the device is out of memory."""
_OPTIONS: Final = {"": {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}}
"""ONNX Runtime, CUDA Execution Provider, configuration options.

`use_tf32`: by default matrix products and convolutions of fp32 models have 10 bits of mantissa. On an H200, answers of
a ResNet-50 then differed from the processor's by more than a move allows, and a row's in a batch from those alone.
`cudnn_conv_algo_search`: by default every algorithm is tried whenever a run's shape is not the one before it, of a
batch or of an image. There, that took a text detector 0.8 to 1.4 s each time, and by the heuristic 0.1 s, with runs as
fast.
"""
ACCESS: Final = DeviceAccess(options=_OPTIONS, host_bytes=_HOST_BYTES)
"""What a driver adds the rest to: the files of its device, and what counts."""
