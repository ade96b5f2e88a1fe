"""`shoal-agent join | run | doctor | clock`, and the front process that `run` starts.

The only room that knows ports, core and adapters together; each command imports what it alone needs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.agent.main import options
from shoal.types.codes import ShoalError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a refusal (printed as `CODE  found  asked  remedy`), 2 for a wrong command line."""
    given = options.parser().parse_args(arguments)
    try:
        match given.command:
            case "join":
                return _join(given.state_dir, given.coordinator, given.token, given.name, dict(given.label))
            case "run":
                from shoal.agent.main.stopping import Stop

                stop = Stop()  # before the rest is imported, which takes most of a start
                from shoal.agent.main.run import run

                return run(options.config(given), stop)
            case "doctor":
                from shoal.agent.main.doctor import doctor

                return doctor(given.state_dir, given.coordinator)
            case "clock":
                from shoal.agent.main.timekeeper import show

                return show(given.state_dir / "journal", confirmed=given.confirm)
            case _:
                return _front(given.config, given.journal)
    except ShoalError as error:
        print(error.refusal, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    return 1


def _join(state_dir: Path, coordinator: str, token: str, name: str, labels: dict[str, str]) -> int:
    from shoal.agent.clock import SystemClock
    from shoal.agent.identity import enrolment

    wall = SystemClock().wall()
    member = enrolment.join(state_dir, coordinator, token, name=name, labels=labels, wall=wall)
    print(json.dumps({"event": "joined", "node": member.name, "region": member.region, "role": member.role}))
    return 0


def _front(config: Path, journal: Path | None) -> int:
    from shoal.agent.clock import FollowedClock
    from shoal.agent.dataplane import main as dataplane
    from shoal.agent.main.timekeeper import followed
    from shoal.agent.telemetry.log import FOLDER
    from shoal.wire import logs

    # config: in `run/` of the state directory.
    logs.configure(process="front", keep=config.parent.parent / FOLDER / "front.log")
    nonce = sys.stdin.readline().strip()
    if journal is None:
        clock = FollowedClock(lambda: None, "")
        return dataplane.run(config, nonce, clock, clock.wall)
    kept = followed(journal)
    return dataplane.run(config, nonce, kept, kept.dates_at)
