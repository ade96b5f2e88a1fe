"""NVML replayed in place of `pynvml`: a JSON recording of each function's answers, error codes included."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED."""


class NVMLError(Exception):
    """As pynvml's: carries the library's code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _record(answer: Any) -> Any:
    if isinstance(answer, dict):
        return SimpleNamespace(**{name: _record(each) for name, each in answer.items()})
    return tuple(map(_record, answer)) if isinstance(answer, list) else answer


class RecordedNvml:
    """A recording maps `function(argument, ..)` to its answer or to `{"error": code}`.

    An object becomes a record with attributes (pynvml's structures), a list a tuple. Handles are the strings that the
    recording itself uses for them. A call that was not recorded is not supported; a function that no call names does
    not exist in this version of the library.
    """

    NVMLError = NVMLError

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not any(call.startswith(f"{name}(") for call in self.answers):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            answer = self.answers.get(f"{name}({', '.join(map(str, arguments))})", {"error": NOT_SUPPORTED})
            if isinstance(answer, dict) and "error" in answer:
                raise NVMLError(answer["error"])
            return _record(answer)

        return call
