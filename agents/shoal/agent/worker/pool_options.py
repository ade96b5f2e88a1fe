"""Limits and timeouts of the worker pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Limits and timeouts of the worker pool. Timeouts count only the time in which this process runs."""

    # Keep a spare from the start. False for a gateway, which runs no model.
    keep_spare: bool = True
    # A worker ends by itself after this many seconds without a connection.
    orphan_after_s: float = 60.0
    # Maximum seconds until a new worker process accepts connections.
    start_timeout_s: float = 60.0
    # Maximum seconds to load and warm up a model.
    load_timeout_s: float = 180.0
    # Maximum seconds of the warm-up alone.
    warm_up_s: float = 60.0
    # A worker that does not answer a status request for this many seconds is killed. One that uses no CPU meanwhile
    # (stopped, or deadlocked) is killed after 2 s.
    stuck_after_s: float = 20.0
    # Loads at the same time.
    max_concurrent_loads: int = 2
    # Maximum requests in one worker: what a front lets wait for a replica (`core.routing.AdmissionLimits.per_replica`).
    queue: int = 1024
    # Intra-op threads of one run.
    threads: int = 1
    # Maximum bytes of one request's expanded tensors.
    max_request_bytes: int = 64 * 2**20
    # A worker may map memory_floor + memory_slack x the bytes that its assignment commits, because it maps more than
    # becomes resident; twice the latter where its answers are compared with the processor's.
    memory_slack: float = 1.5
    # Bytes; see memory_slack.
    memory_floor: int = 256 * 2**20
    # Maximum seconds of one probe.
    probe_s: float = 10.0
    # Maximum models that share one worker.
    max_shared_models: int = 8
    # Maximum bytes committed together for the models that share one worker.
    max_shared_bytes: int = 2 * 2**30
