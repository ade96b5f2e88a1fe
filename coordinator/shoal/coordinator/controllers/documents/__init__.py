"""Revisions of applied documents, pushed models and packs, and publishers' signatures. May import log only."""
