"""Reads a printed page with the PP-OCR models: the demo's requests, and how it decodes the answers.

Detection returns the probability of text for each pixel; connected regions of it, grown, are the lines. Recognition
returns the probability of each character for each slice of a line; greedy CTC decoding makes the text. Preprocessing
follows PaddleOCR's published inference configuration (mean, deviation, height 48; regions grown as in Differentiable
Binarization, Liao et al. 2020: area x ratio / perimeter).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from shoal.types.codes import Code, refuse

Floats = NDArray[np.float32]
Infer = Callable[[str, Floats], Floats]
"""(workload, input x) -> its one output"""

DET_SCALE: Final = 2
"""The page is 384 x 191 pixels and its letters are small: at twice the size, detection separates the lines."""
THRESHOLD: Final = 0.3
MIN_AREA: Final = 100
GROW: Final = 1.3
BAND: Final = 23
"""Height of a line of the page."""
SLICE: Final = 192
"""Width of the classifier's input in PaddleOCR's configuration."""
STRETCH: Final = 1.3
"""Lines are sent a little wider than their height implies: the recogniser then keeps the spaces of this narrow font."""

LINES: Final = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
    ">>> markers = np.zeros_like(coins)",
)
"""The text of scikit-image's test picture `page.png`, as a person reads it."""


@dataclass(frozen=True, slots=True)
class Box:
    """A region in pixels, right and bottom exclusive."""

    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True, slots=True)
class OcrFiles:
    """Paths of models and page within the installed wheels."""

    detector: Path
    recogniser: Path
    classifier: Path
    page: Path


def files() -> OcrFiles:
    """Raises ShoalError(NOT_FOUND) with the command that installs them."""
    models = _folder("rapidocr_onnxruntime") / "models"
    found = OcrFiles(
        models / "ch_PP-OCRv4_det_infer.onnx",
        models / "ch_PP-OCRv4_rec_infer.onnx",
        models / "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        _folder("skimage") / "data" / "page.png",
    )
    for path in (found.detector, found.recogniser, found.classifier, found.page):
        if not path.is_file():
            raise refuse(Code.NOT_FOUND, f"{path.name} is not in its wheel", "another version of it", _INSTALL)
    return found


def read_page(page: Image.Image, alphabet: list[str], detect: str, recognise: str, infer: Infer) -> tuple[str, ...]:
    """The lines of text from top to bottom. alphabet: index 0 is CTC's blank."""
    rgb = page.convert("RGB")
    boxes = find_lines(infer(detect, detection_input(rgb))[0, 0])
    likely = (infer(recognise, line_input(crop(rgb, box))) for box in boxes)
    return tuple(decode(one[0], alphabet) for one in likely)


def detection_input(page: Image.Image) -> Floats:
    """[1, 3, H, W], H and W multiples of 32."""
    width, height = (round(side * DET_SCALE / 32) * 32 for side in page.size)
    pixels = np.asarray(page.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 255
    scaled = (pixels - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], dtype=np.float32)


def find_lines(likely: Floats) -> list[Box]:
    """Boxes of text lines in the map's pixels, top to bottom."""
    regions = [
        box for box in _regions(likely > THRESHOLD) if (box.bottom - box.top) * (box.right - box.left) > MIN_AREA
    ]
    lines: list[Box] = []
    for box in sorted(regions, key=lambda box: box.top + box.bottom):
        for index, line in enumerate(lines):
            apart = abs((line.top + line.bottom) - (box.top + box.bottom)) / 2
            if apart < min(line.bottom - line.top, box.bottom - box.top) / 2:
                lines[index] = Box(
                    min(line.top, box.top),
                    min(line.left, box.left),
                    max(line.bottom, box.bottom),
                    max(line.right, box.right),
                )
                break
        else:
            lines.append(box)
    return lines


def crop(page: Image.Image, box: Box) -> Image.Image:
    """The line's part of the page; `box` in the pixels of the detection map."""
    width, height = box.right - box.left, box.bottom - box.top
    grow = width * height * GROW / (2 * (width + height))
    across = page.width / (round(page.width * DET_SCALE / 32) * 32)
    down = page.height / (round(page.height * DET_SCALE / 32) * 32)
    return page.crop(
        (
            max(0, round((box.left - grow) * across)),
            max(0, round((box.top - grow) * down)),
            min(page.width, round((box.right + grow) * across)),
            min(page.height, round((box.bottom + grow) * down)),
        )
    )


def line_input(line: Image.Image) -> Floats:
    """[1, 3, 48, W]."""
    width = max(48, round(line.width * 48 / line.height * STRETCH))
    pixels = np.asarray(line.resize((width, 48), Image.Resampling.LANCZOS), np.float32) / 255
    return np.ascontiguousarray(((pixels - 0.5) / 0.5).transpose(2, 0, 1)[None], dtype=np.float32)


def slices(page: Image.Image) -> Floats:
    """What the angle classifier sees of the page: [slices, 3, 48, SLICE]."""
    rgb = page.convert("RGB")
    bands = (line_input(rgb.crop((0, top, rgb.width, top + BAND))) for top in range(0, rgb.height - BAND, BAND))
    found = [each[..., at : at + SLICE] for each in bands for at in range(0, each.shape[-1] - SLICE + 1, SLICE)]
    return np.concatenate(found)


def decode(likely: Floats, alphabet: list[str]) -> str:
    """Greedy CTC: the best character of each slice, repeats and blanks dropped. likely: [slices, characters]."""
    best = likely.argmax(axis=1)
    fresh = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(alphabet[index] for index in best[(best != 0) & fresh])


def alphabet(recogniser: Path) -> list[str]:
    """The characters that the recogniser distinguishes; PP-OCR keeps them in the model's metadata, one per line."""
    metadata = {entry.key: entry.value for entry in onnx.load(recogniser, load_external_data=False).metadata_props}
    return ["", *metadata["character"].splitlines(), " "]


def _regions(mask: NDArray[np.bool_]) -> list[Box]:
    """Bounding boxes of 4-connected regions, by runs of each row joined to those above."""
    parent: list[int] = []
    runs: list[tuple[int, int, int]] = []

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    above: list[int] = []
    for row, pixels in enumerate(mask):
        edges: list[Any] = np.flatnonzero(np.diff(np.concatenate(([0], pixels.astype(np.int8), [0])))).tolist()
        here = []
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            index = len(parent)
            parent.append(index)
            runs.append((row, start, end))
            for other in above:
                if runs[other][1] < end and start < runs[other][2]:
                    parent[root(other)] = root(index)
            here.append(index)
        above = here
    boxes: dict[int, Box] = {}
    for index, (row, start, end) in enumerate(runs):
        key = root(index)
        box = boxes.get(key, Box(row, start, row + 1, end))
        boxes[key] = Box(min(box.top, row), min(box.left, start), max(box.bottom, row + 1), max(box.right, end))
    return list(boxes.values())


_INSTALL: Final = "pip install --no-deps rapidocr-onnxruntime scikit-image"


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise refuse(Code.NOT_FOUND, f"the demo's files: package {package} is not installed", "its wheel", _INSTALL)
    return Path(found.origin).parent
