"""What a supervisor understands of a front."""

import json

from shoal.agent.dataplane import control
from shoal.agent.ports import FrontStats
from shoal.types.assignment import AgreementCounts
from shoal.types.units import Seconds


def test_a_front_of_the_version_before_is_understood() -> None:
    """It serves on while its supervisor is replaced, and does not say what is counted since."""
    counts = AgreementCounts("ag-1", "east", 3, 1, Seconds(0.25), (0, 2))
    stats = FrontStats(ready=True, ingress=(), in_flight=(), agreement_counts=(counts,))
    assert control.unpack_stats(control.pack_stats(stats)) == stats
    said = json.loads(control.pack_stats(stats))
    del said["agreement_counts"][0]["latencies"]
    (told,) = control.unpack_stats(json.dumps(said).encode()).agreement_counts
    assert told == AgreementCounts("ag-1", "east", 3, 1, Seconds(0.25))
