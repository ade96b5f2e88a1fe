"""Checkers read the record of a run, or a region's state, and report what must never happen.

Layers: run > scenarios > parts > checkers > world.
"""
