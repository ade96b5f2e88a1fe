"""Virtual time, seeded randomness, processes and disks. Lowest layer: run > scenarios > parts > checkers > world."""
