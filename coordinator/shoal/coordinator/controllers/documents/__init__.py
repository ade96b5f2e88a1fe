"""Applied documents, their revisions, pushed models and packs, and publishers' signatures. May import log only."""
