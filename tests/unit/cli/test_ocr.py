"""The page that the demo reads, with the models in this very process: the known text, line by line."""

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from shoal.devstack import ocr


def test_page_is_read_line_by_line() -> None:
    files = ocr.files()
    sessions = {
        "find": onnxruntime.InferenceSession(str(files.detector), providers=["CPUExecutionProvider"]),
        "read": onnxruntime.InferenceSession(str(files.recogniser), providers=["CPUExecutionProvider"]),
    }
    alphabet = ocr.alphabet(files.recogniser)

    def infer(workload: str, value: ocr.Floats) -> ocr.Floats:
        return np.asarray(sessions[workload].run(None, {"x": value})[0], np.float32)

    assert ocr.read_page(Image.open(files.page), alphabet, "find", "read", infer) == ocr.LINES


def test_lines_are_joined_from_words_and_sorted() -> None:
    likely = np.zeros((60, 200), np.float32)
    likely[40:52, 10:60] = 0.9
    likely[41:53, 80:150] = 0.9
    likely[5:17, 20:180] = 0.9
    likely[30, 3] = 0.9  # a speck
    assert ocr.find_lines(likely) == [ocr.Box(5, 20, 17, 180), ocr.Box(40, 10, 53, 150)]


def test_decoding_drops_blanks_and_repeats_but_keeps_doubles() -> None:
    best = [1, 1, 0, 1, 2, 2, 0, 0, 3]
    likely = np.eye(4, dtype=np.float32)[best]
    assert ocr.decode(likely, ["", "l", "o", "t"]) == "llot"


@pytest.mark.parametrize(("size", "shape"), [((384, 191), (1, 3, 384, 768)), ((100, 50), (1, 3, 96, 192))])
def test_detection_input_is_a_multiple_of_32(size: tuple[int, int], shape: tuple[int, ...]) -> None:
    assert ocr.detection_input(Image.new("RGB", size)).shape == shape
