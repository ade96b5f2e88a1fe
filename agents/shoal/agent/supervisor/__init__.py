"""The supervisor process: decides nothing itself (`core` does), knows no adapter by name (`ports` says what it needs).

`Supervisor` keeps the link and the desired set; `replicas` carries out what assignments ask for; `gauges` is what it
sees of devices, workers and front.
"""

from shoal.agent.supervisor.supervisor import Settings, Snapshot, Supervisor

__all__ = ["Settings", "Snapshot", "Supervisor"]
