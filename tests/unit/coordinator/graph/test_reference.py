"""The documented rules for open axes, each once."""

import pytest

from harness.models.synthetic import FLOAT, INT64, Axes, tensor
from shoal.coordinator.core.graph.reference import Scheme, check_shapes, reference_inputs

SCHEME = Scheme(height=100, width=200, sequence=30, samples=400)


@pytest.mark.parametrize(
    ("axes", "dtype", "expected"),
    [
        ((None, 3, None, None), FLOAT, (1, 3, 100, 200)),
        ((None, None, None, 3), FLOAT, (1, 100, 200, 3)),
        ((None, None, None, None), FLOAT, (1, 3, 100, 200)),
        ((None, 3, 48, None), FLOAT, (1, 3, 48, 320)),
        ((None, 3, 512, None), FLOAT, (1, 3, 512, 200)),
        ((None, 1, None, None, None), FLOAT, (1, 1, 16, 100, 200)),
        ((None, None), INT64, (1, 30)),
        ((None, None), FLOAT, (1, 400)),
        (("N", "sequence"), FLOAT, (1, 400)),
        (("sequence_length", 576), FLOAT, (30, 576)),
        ((None, None, 80), FLOAT, (1, 30, 80)),
        ((2, None, 128), FLOAT, (2, 1, 128)),
        ((4, "batch_size", "past_len", 64), FLOAT, (4, 1, 30, 64)),
        ((-1, 8), FLOAT, (1, 8)),
        ((), FLOAT, ()),
        ((None,), INT64, (1,)),
        ((0, 4), FLOAT, (0, 4)),
    ],
)
def test_open_axes(axes: Axes, dtype: int, expected: tuple[int, ...]) -> None:
    assert reference_inputs([tensor("x", axes, dtype)], SCHEME)["x"].shape == expected


def test_one_symbol_has_one_length() -> None:
    found = reference_inputs([tensor("a", ["n", 4]), tensor("b", [7, "n"])], SCHEME)
    assert (found["a"].shape, found["b"].shape) == ((1, 4), (7, 1))


def test_a_question_mark_names_no_axis() -> None:
    """Paddle's exporter calls every open axis so: height and width of a line of text, too."""
    inputs = [tensor("x", [-1, 3, "?", "?"])]
    assert reference_inputs(inputs, SCHEME)["x"].shape == (1, 3, 100, 200)
    shapes = {"x": (1, 3, 48, 192)}
    assert check_shapes(inputs, shapes) is None
    assert reference_inputs(inputs, SCHEME, shapes)["x"].shape == (1, 3, 48, 192)
    others = [*inputs, tensor("z", ["?", 2])]
    assert reference_inputs(others, SCHEME, shapes)["z"].shape == (1, 2), "it says nothing of another input either"


def test_an_unknown_number_of_axes_stays_unknown() -> None:
    assert reference_inputs([tensor("x", None)], SCHEME)["x"].shape is None
