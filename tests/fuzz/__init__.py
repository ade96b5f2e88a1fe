"""Coverage-guided fuzzing of everything that reads strangers' bytes (A13)."""
