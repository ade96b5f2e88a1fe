"""As in `stack/test_ages.py`, where the nodes' links are carried by a broker."""

from harness.cluster.ages import check_ages_outlive_the_coordinator
from harness.cluster.stack import DevStack


def test_what_is_listed_is_as_old_after_a_restart_of_the_coordinator(stack: DevStack) -> None:
    check_ages_outlive_the_coordinator(stack)
