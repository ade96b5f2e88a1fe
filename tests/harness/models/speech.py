"""A streaming voice activity detector (silero-vad), and synthesised speech (espeak-ng, from Debian) as its input."""

import io
import subprocess
import wave
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from harness.models.synthetic import file_in

DETECTOR: Final = file_in("silero_vad", "data/silero_vad_openvino_16k.onnx")
"""From silero-vad's wheel: for 16 kHz only, with fixed shapes. Its other model names no length of a step."""
NAME: Final = "vad"
WORKLOAD: Final = f"""apiVersion: shoal/v1
kind: Workload
metadata: {{name: {NAME}}}
spec:
  model: {{source: vad}}
  policy: streams
  session: {{state: {{state: stateN}}}}
  capture: {{consent: true}}
"""
"""The detector as a stateful workload `vad` under policy `streams`; its model is pushed as `vad`."""
RATE: Final = 16_000
FRAME: Final = 512
"""Samples of one step of silero-vad at 16 kHz; each comes with the last `CONTEXT` of the one before."""
CONTEXT: Final = 64
_VOICES: Final = ("en", "de", "fr", "es", "it")
_TEXTS: Final = (
    "the quick brown fox jumps over the lazy dog",
    "a model moves from one machine to another while people talk to it",
    "one two three four five six seven eight nine ten",
    "who is speaking now, and who was silent before",
    "nothing is lost on the way, not a word of it",
)


@cache
def frames(speaker: int) -> NDArray[Any]:
    """(steps, CONTEXT + FRAME) of float32 in [-1, 1]: a sentence of that speaker, with silence around it."""
    text, voice = _TEXTS[speaker % len(_TEXTS)], _VOICES[speaker // len(_TEXTS) % len(_VOICES)]
    pitch, speed = 30 + speaker % 40, 140 + 5 * (speaker % 12)
    spoken = subprocess.run(
        ["espeak-ng", "-v", voice, "-p", str(pitch), "-s", str(speed), "--stdout", text],
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    with wave.open(io.BytesIO(spoken)) as file:
        told = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype(np.float32) / 32768
        at = np.arange(0, len(told) * RATE / file.getframerate()) * file.getframerate() / RATE
    sound = np.interp(at, np.arange(len(told)), told).astype(np.float32)
    silence = np.zeros(RATE // 2, np.float32)
    whole = np.concatenate([silence, sound, silence])
    count = len(whole) // FRAME
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), whole])
    return np.stack([padded[step * FRAME : step * FRAME + CONTEXT + FRAME] for step in range(count)])
