"""Sessions of agents: which nodes are connected, what they report, and which of it is stored. May import log only."""
