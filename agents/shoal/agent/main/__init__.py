"""`shoal-agent join | run | doctor | record | clock`, and the front process that `run` starts.

The only package that knows ports, core and adapters together. Each command imports only what it needs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.host.lean_imports import without
from shoal.types.codes import ShoalError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 for a refusal, printed as `found: ..; wanted: ..; try: .. (CODE)`; 2 with USAGE for a command
    line that cannot be read."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # structlog would import them, for consoles and for another kind of threads: 5 and 1 MiB of each process
        with without("rich", "greenlet"):
            return _front(words[1:]) if words[:1] == ["front"] else _run_command(words)
    except ShoalError as error:
        from shoal.host.refusal_text import print_refusal

        print_refusal(error.refusal)
    except KeyboardInterrupt:
        pass
    return 1


def _run_command(words: Sequence[str]) -> int:
    from shoal.agent.main import options

    given = options.parser().parse_args(words)
    match given.command:
        case "join":
            return _join(given.state_dir, given.coordinator, given.token, given.name, dict(given.label))
        case "run":
            from shoal.agent.devices.installation import DriverSearch, start_search
            from shoal.agent.main.stop_signals import StopSignals

            stop = StopSignals()
            config = options.make_config(given)
            installation = start_search(DriverSearch(options.driver_options(config), config.cpu))
            # After these: the other imports take most of a start.
            from shoal.agent.main.run import run

            return run(config, stop, installation)
        case "doctor":
            from shoal.agent.main.doctor import doctor

            return doctor(given.state_dir, given.coordinator)
        case "record":
            from shoal.agent.main.record import record

            return record(given.driver, given.out)
        case _:
            from shoal.agent.main.timekeeper import show_clock

            return show_clock(given.state_dir / "journal", confirmed=given.confirm)


def _join(state_dir: Path, coordinator: str, token: str, name: str, labels: dict[str, str]) -> int:
    from shoal.agent.clock import SystemClock
    from shoal.agent.identity.certificate import join

    wall = SystemClock().wall()
    member = join(state_dir, coordinator, token, name=name, labels=labels, wall=wall)
    print(json.dumps({"event": "joined", "node": member.name, "region": member.region, "role": member.role}))
    return 0


def _front(words: Sequence[str]) -> int:
    """`--config PATH [--journal PATH]`: the supervisor's front process. It lives as long as the node, and what reads a
    command line for people takes memory that it does not need."""
    from shoal.agent.clock import FollowerClock
    from shoal.agent.dataplane import main as dataplane
    from shoal.agent.main.timekeeper import make_front_clock
    from shoal.agent.telemetry.log import FOLDER
    from shoal.host import logs

    given = dict(zip(words[::2], words[1::2], strict=False))
    if len(words) != 2 * len(given) or "--config" not in given or not given.keys() <= {"--config", "--journal"}:
        print("shoal-agent front is what `shoal-agent run` starts: --config PATH [--journal PATH]", file=sys.stderr)
        return 2
    config, journal = Path(given["--config"]), given.get("--journal")
    # `config` lies in `run/` of the state directory.
    logs.configure(process="front", log_file=config.parent.parent / FOLDER / "front.log")
    nonce = sys.stdin.readline().strip()
    if journal is None:
        clock = FollowerClock(lambda: None, "")
        return dataplane.run(config, nonce, clock, clock.wall)
    kept = make_front_clock(Path(journal))
    return dataplane.run(config, nonce, kept, kept.validity_wall)
