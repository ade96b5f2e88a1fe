"""A coordinator that starts again says of everything how old it is, as the one before it did."""

from harness.cluster.ages import check_ages_outlive_the_coordinator
from harness.cluster.stack import DevStack


def test_what_is_listed_is_as_old_after_a_restart_of_the_coordinator(stack: DevStack) -> None:
    check_ages_outlive_the_coordinator(stack)
