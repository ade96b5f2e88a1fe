"""A lease ends when its node said, at whatever moment the front reads it."""

import pytest

from shoal.agent.clock import FollowerClock, SystemClock
from shoal.agent.core.timekeeping import SavedClock
from shoal.agent.dataplane import control
from shoal.types.codes import ShoalError
from shoal.types.units import Elapsed, Seconds, Wall


def test_both_processes_mean_the_same_moment() -> None:
    kept = SavedClock("boot-1", Seconds(0.0), Elapsed(1e6), Wall(1.7e9))
    own, front = SystemClock(kept, boot="boot-1"), FollowerClock(lambda: kept, "boot-1")
    assert abs(own.now() - front.now()) > 1e5  # scales of their own
    before = front.now()
    told, claim = control.unpack_lease(control.pack_lease(own.ticks(Elapsed(own.now() + 300.0)), "h/2"))
    assert claim == "h/2"
    assert before + 300.0 <= told + 1e-3 <= front.now() + 300.0 + 2e-3


def test_what_is_no_moment_is_refused() -> None:
    for payload in (b"", b"{}", b'{"until": "soon"}', b'{"until": null}'):
        with pytest.raises(ShoalError, match="MESSAGE_INVALID"):
            control.unpack_lease(payload)
