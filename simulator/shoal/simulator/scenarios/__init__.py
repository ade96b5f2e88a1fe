"""What one seed does: a region or a federation, the faults that strike it, and how the run ends.

Layers: run > scenarios > parts > checkers > world.
"""
