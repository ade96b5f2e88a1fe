"""Read-only answers: can-move, delegation previews, traces and node logs. May import federation, workloads, identity,
fleet, documents and log.
"""
