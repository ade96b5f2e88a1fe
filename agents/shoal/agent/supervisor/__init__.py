"""The supervisor process. It decides nothing itself (`core` does) and knows no adapter by name, only `ports`.

- `Supervisor` keeps the link and the desired set, and makes the node match it.
- `replicas` performs the effects that `core.assignment` requests.
- `node_monitor` reads devices and the counters of workers and front.
- `device_probes` measures devices, and keeps their receipts.
- `front_updates` configures the front.
- `status_reporter` says what the node is; `outbox` keeps what waits for a link.
"""

from shoal.agent.supervisor.settings import SupervisorSettings
from shoal.agent.supervisor.status_reporter import NodeSnapshot
from shoal.agent.supervisor.supervisor import Supervisor
from shoal.agent.supervisor.supervisor_ports import SupervisorPorts

__all__ = ["NodeSnapshot", "Supervisor", "SupervisorPorts", "SupervisorSettings"]
