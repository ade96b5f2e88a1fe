"""What tests share: waiting for conditions, free ports, real processes, call histories and their checker."""
