"""What tests share: waiting on conditions, free ports, real processes, histories and their judge."""
