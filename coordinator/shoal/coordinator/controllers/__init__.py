"""The coordinator's controllers: stateful shells around the pure cores, one room for each concern.

A room imports only rooms below it, from top to bottom: region, queries, federation, workloads, identity, fleet |
documents, log.
"""
