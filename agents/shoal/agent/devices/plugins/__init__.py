"""Devices of execution providers that are plugins of ONNX Runtime: one driver for all, and a module for each vendor
with what the runtime does not tell."""
