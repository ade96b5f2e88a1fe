"""The page of what the programs write to their logs, from the log calls."""

from style.log_events import log_calls, page, trees
from style.words import ROOT

from shoal.host.log_events import MEANINGS


def log_events() -> str:
    return page([call for path, tree in trees(ROOT) for call in log_calls(path, tree)], MEANINGS)
