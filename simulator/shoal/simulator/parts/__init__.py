"""Simulated adapters for the ports of the real agent and coordinator: machines, networks, brokers, stores, operators.

Layers: run > scenarios > parts > checkers > world.
"""
