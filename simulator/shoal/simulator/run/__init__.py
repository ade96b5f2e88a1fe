"""Runs many seeds on all cores. Highest layer: run > scenarios > parts > checkers > world."""
