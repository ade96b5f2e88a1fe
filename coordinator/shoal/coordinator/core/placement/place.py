from shoal.coordinator.core.placement.model import Inputs, Plan


def place(inputs: Inputs) -> Plan:
    """Where every workload shall run, why, and what would have to give where it cannot."""
    raise NotImplementedError
