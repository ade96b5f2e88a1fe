"""Makes of a pushed model what a device or a policy asks for, before a worker loads it: another precision,
or its compiled form.

Each preparation is a program of its own, confined like a worker, and its result is kept. Only that program imports the
runtime and `onnx` (the agent's extra `prepare`).
"""
