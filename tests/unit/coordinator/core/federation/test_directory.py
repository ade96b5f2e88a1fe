"""Who is in the federation, for how long its word counts, how far it is believed; whom a solicitation goes to."""

from dataclasses import replace
from typing import Any

from harness.builders.federation_members import GIB, advertisement, capacity, member
from harness.builders.negotiation import ORIGIN, solicitation
from shoal.coordinator.core.federation.directory import (
    RECORDS_KEPT,
    FederationState,
    make_directory,
    merge_deliveries,
    standing_of,
    trust_score,
)
from shoal.coordinator.core.federation.shortlist import ASKED_MOST, shortlist, silence_reasons
from shoal.coordinator.core.negotiation.standing import LedgerStandings, RegionStanding
from shoal.types.agreement import Delivered
from shoal.types.codes import Code
from shoal.types.offer import Member
from shoal.types.units import Elapsed, Seconds, Wall

NOON = Wall(1.7e9)


def book(*regions: str) -> FederationState:
    found = FederationState()
    for region in regions:
        found = found.with_member(member(region)).with_advertisement(advertisement(region), Elapsed(100.0))
    return found


def names(members: tuple[Member, ...]) -> list[str]:
    return [each.region for each in members]


def delivery(agreement: str, seconds: float, *, region: str = "eu", breached: bool = False) -> Delivered:
    return Delivered(region, agreement, Seconds(0.1), Seconds(seconds), 100, breached)


def test_a24_the_last_good_advertisement_ages_out() -> None:
    known = book("eu")
    assert make_directory(known, "fed", Elapsed(109.0), NOON).members[0].advertisement is not None
    silent = make_directory(known, "fed", Elapsed(110.0), NOON).members[0]
    assert silent.advertisement is None
    assert silent.address == "eu:7447", "it is a member still"


def test_the_same_advertisement_from_another_replica_extends_nothing() -> None:
    known = book("eu").with_advertisement(advertisement("eu"), Elapsed(108.0))
    assert make_directory(known, "fed", Elapsed(110.0), NOON).members[0].advertisement is None


def test_the_version_tells_of_what_matters_and_not_of_each_beat() -> None:
    version = make_directory(book("eu", "us"), "fed", Elapsed(101.0), NOON).version
    assert version > 0
    beat = book("eu", "us").with_advertisement(advertisement("eu", 2, rtt_s={"us": 0.1}), Elapsed(101.0))
    slightly = book("eu", "us").with_advertisement(
        advertisement("eu", 2, classes=(capacity(free_bytes=101 * GIB),)), Elapsed(101.0)
    )
    half = book("eu", "us").with_advertisement(
        advertisement("eu", 2, classes=(capacity(free_bytes=50 * GIB),)), Elapsed(101.0)
    )
    assert make_directory(beat, "fed", Elapsed(101.0), NOON).version == version
    assert make_directory(slightly, "fed", Elapsed(101.0), NOON).version == version
    for other in (half, book("eu"), book("eu", "us").with_member(member("us", address="us:1"))):
        assert make_directory(other, "fed", Elapsed(101.0), NOON).version != version
    assert make_directory(book("eu", "us"), "fed", Elapsed(200.0), NOON).version != version, "what aged out is told"


def test_who_left_is_gone_and_its_record_is_not() -> None:
    known = book("eu", "us").with_deliveries("us", {"eu": (delivery("a", 0.5, breached=True),)})
    left = known.without("eu")
    assert names(make_directory(left, "fed", Elapsed(101.0), NOON).members) == ["us"]
    assert left.with_member(member("eu")).trust["eu"] < 1


def test_trust_is_the_median_of_what_origins_saw() -> None:
    kept, broken = (delivery("a", 0.05),) * 3, tuple(delivery(f"b{n}", 9.0, breached=True) for n in range(3))
    known = book("eu").with_deliveries("us", {"eu": kept}).with_deliveries("ap", {"eu": kept})
    assert known.trust["eu"] == 1.0
    assert known.with_deliveries("liar", {"eu": broken}).trust["eu"] == 1.0, "one that lies ruins nobody alone"
    assert FederationState().with_deliveries("us", {"eu": broken}).trust["eu"] < 0.5
    assert trust_score("eu", {}) == 1.0


def test_a_record_has_the_newest_word_of_each_agreement() -> None:
    first, second = delivery("a", 0.1), delivery("a", 0.9)
    assert merge_deliveries((first,), (second,)) == (second,)
    many = tuple(delivery(f"a{n}", 0.1) for n in range(RECORDS_KEPT + 5))
    assert merge_deliveries((), many) == many[5:]


def members(**changed: Any) -> tuple[Member, ...]:
    """eu and us with room; changed: advertisements by region, None: silent."""
    regions = {"eu": {}, "us": {}} | changed
    return tuple(
        member(region, advertisement=None if changes is None else advertisement(region, **changes))
        for region, changes in sorted(regions.items())
    )


def test_asked_are_others_that_fit_the_patterns_and_have_room() -> None:
    asked = replace(solicitation(), origin="ap")
    assert names(shortlist(asked, members())) == ["eu", "us"]
    assert names(shortlist(asked, members(ap={}))) == ["eu", "us"], "nobody asks himself"
    assert names(shortlist(replace(asked, origin="eu"), members())) == ["us"]
    assert names(shortlist(replace(asked, to=("e*",)), members())) == ["eu"]
    assert names(shortlist(asked, members(us=None))) == ["eu"], "who is silent is not asked"
    assert names(shortlist(asked, members(us={"classes": ()}))) == ["eu"]
    assert names(shortlist(asked, members(us={"classes": (capacity(free_bytes=1),)}))) == ["eu"]
    assert names(shortlist(asked, members(us={"classes": (capacity(precisions=("int4",)),)}))) == ["eu"]


def test_those_that_nothing_came_from_have_a_reason_each() -> None:
    asked = replace(solicitation(residency=("eu", "us", "ap", "silent", "small", "other")), origin="ap", to=("*",))
    changed = {
        "silent": None, "small": {"classes": (capacity(free_bytes=1),)}, "ap": {},
        "other": {"classes": (capacity(precisions=("int4",)),)},
    }  # fmt: skip
    far = member("far", residency="mars", advertisement=advertisement("far"))
    found = silence_reasons(asked, (*members(**changed), far), {"us"})
    assert {region: why.code for region, why in found.items()} == {
        "eu": Code.PEER_UNREACHABLE,
        "silent": Code.PEER_UNREACHABLE,
        "small": Code.MEMORY_SHORT,
        "other": Code.PRECISION_DENIED,
        "far": Code.RESIDENCY,
    }
    assert found["eu"].found == "no answer"
    assert "advertises nothing" in found["silent"].found
    assert "1B free at most" in found["small"].found
    assert silence_reasons(replace(asked, to=("us",)), members(), {"us"}) == {}, "the policy names no other"
    assert list(silence_reasons(asked, members(**changed), (), most=1)) == ["eu"]


def test_those_beyond_the_shortlist_were_not_asked() -> None:
    crowd = tuple(member(f"r{n:02}", advertisement=advertisement(f"r{n:02}")) for n in range(ASKED_MOST + 2))
    asked = {each.region for each in shortlist(solicitation(), crowd)}
    found = silence_reasons(solicitation(), crowd, asked, most=ASKED_MOST)
    assert {each.region for each in crowd} - asked == found.keys()
    assert {why.code for why in found.values()} == {Code.NO_BID}


def test_residency_is_a_matter_of_who_is_asked() -> None:
    asked = solicitation(residency=("eu", "ch"))
    here = member("north", residency="eu", advertisement=advertisement("north"))
    named = member("ch", advertisement=advertisement("ch"))
    there = member("east", residency="us", advertisement=advertisement("east"))
    unknown = member("west", advertisement=advertisement("west"))
    assert names(shortlist(asked, (here, named, there, unknown))) == ["ch", "north"]


def test_the_trusted_come_first_and_then_the_near() -> None:
    asked = replace(solicitation(), way_s={"eu": 0.2, "us": 0.1, "ap": 0.01})
    eu, us = members()
    doubtful = member("ap", trust=0.4, advertisement=advertisement("ap"))
    unmeasured = member("sa", advertisement=advertisement("sa"))
    told = member("af", advertisement=advertisement("af", rtt_s={ORIGIN: 0.15}))
    found = shortlist(asked, (doubtful, unmeasured, eu, told, replace(us, region="us")))
    assert names(found) == ["us", "af", "eu", "sa", "ap"]


def test_no_more_are_asked_than_can_be_waited_for() -> None:
    many = tuple(member(f"r{n:02}", advertisement=advertisement(f"r{n:02}")) for n in range(40))
    assert len(shortlist(solicitation(), many)) == ASKED_MOST


def credits_of(value: float) -> LedgerStandings:
    return LedgerStandings({"eu": RegionStanding(value, NOON)})


def test_a28_an_asker_stands_as_the_median_of_those_who_held_for_it() -> None:
    one = book("eu", "us", "ap", "sa").with_askers("us", credits_of(0.1))
    known = one.with_askers("ap", credits_of(0.5))
    assert standing_of(known, "us", NOON) == 1.0
    assert standing_of(one, "eu", NOON) == 1.0, "one that lies ruins nobody alone"
    assert standing_of(known.with_askers("sa", credits_of(0.9)), "eu", NOON) == standing_of(known, "eu", NOON) == 0.5
    assert standing_of(known.with_askers("eu", credits_of(1.0)), "eu", NOON) == 0.5, "nobody speaks for itself"
    assert standing_of(known, "eu", Wall(NOON + 3600)) > 0.99
    (before, after) = (
        make_directory(each, "fed", Elapsed(101.0), NOON) for each in (book("eu", "us", "ap", "sa"), known)
    )
    assert before.version != after.version
    assert [each.standing for each in after.members if each.region != "eu"] == [1.0, 1.0, 1.0]


def test_a28_of_whose_holds_nothing_comes_fewer_are_asked() -> None:
    members = [member(f"r{n:02}", advertisement=advertisement(f"r{n:02}")) for n in range(20)]
    assert len(shortlist(solicitation(), members)) == ASKED_MOST
    assert len(shortlist(solicitation(), members, standing=0.5)) == ASKED_MOST // 2
    assert len(shortlist(solicitation(), members, standing=0.01)) == 1
