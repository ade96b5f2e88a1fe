"""The text of a refusal, and what its reader makes of it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.types.codes import Code, Refusal

PARTS = st.text().filter(lambda text: ";" not in text and "(" not in text)
REFUSALS = st.builds(Refusal, st.sampled_from(Code), PARTS, PARTS, PARTS)


@given(REFUSALS)
def test_a_text_is_read_back(refusal: Refusal) -> None:
    assert Refusal.parse(str(refusal), refusal.code) == refusal
    assert Refusal.parse(refusal.words, refusal.code) == refusal


@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from(["found: ", "; wanted: ", "; try: ", "a", " ", "(INTERNAL)"])).map("".join)
    ),
    st.sampled_from(Code),
)
def test_any_text_is_read_and_its_code_never_told_twice(text: str, code: Code) -> None:
    read = Refusal.parse(text, code)
    assert read.code is code
    whole = f"{text} ({code})"
    assert str(Refusal.parse(whole, code)).count(f"({code})") <= whole.count(f"({code})")
    assert Refusal.parse(str(read), code).words == read.words


def test_other_text_is_what_was_found() -> None:
    assert Refusal.parse("upstream connect error", Code.INTERNAL) == Refusal(Code.INTERNAL, "upstream connect error")
    found = Refusal(Code.INTERNAL, "a; b (X)", "", "c")
    assert Refusal.parse(str(found), Code.INTERNAL) == found
    assert Refusal.parse(str(replace(found, code=Code.TOO_LARGE)), Code.INTERNAL).remedy == "c (TOO_LARGE)"
