"""Other fronts of a region, as a front sees them."""

from shoal.types.route import Endpoint
from shoal.types.units import Seconds


class NoPeers:
    """No other front."""

    def configure(self, _listed: object) -> None: ...

    def is_connecting(self, _endpoint: Endpoint) -> bool:
        return False

    def rtt_s(self, _endpoint: Endpoint) -> Seconds:
        return Seconds(0.0)
