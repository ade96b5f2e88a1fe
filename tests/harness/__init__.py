"""What the tests of several folders share, as packages by subject.

- `builders`: values and documents that a test starts from.
- `fakes`: in-process stand-ins for ports and other parts, and fixtures around them.
- `servers`: real third-party servers on loopback, and stubs of servers.
- `cluster`: real processes of Shoal, from one front to a federation.
- `clients`: clients of the data plane, of MQTT and of the command line.
- `models`: ONNX models, generated or from wheels.
- `crypto`: certificates and model signatures.
- `faults`: what breaks networks, disks, clocks and processes; `attacks`: hostile clients, fuzzers, and their bystander.
- `measure`: call histories with their checker, and costs of processes.
- `ports`, `report`, `wait`: free ports, figures of the rows, waiting for a condition.

A helper of one folder alone is a module of that folder; no test imports a test module (`tests/style/imports.py`).
"""
