"""Which ONNX Runtime is installed. Does not import it, because only workers do."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_VERSION: Final = re.compile(r"""^__version__ = ["']([\w.+-]+)["']$""", re.MULTILINE)
_FILES: Final = ("capi/build_and_package_info.py", "__init__.py")
"""Where the package says it; the first is made with each build, and there a nightly one names its day too."""


def runtime_version() -> str:
    """Like `onnxruntime 1.31.1`; empty if none is installed.

    Of the package itself: distributions (`onnxruntime`, `onnxruntime-gpu`, ..) install it over one another, and the
    last one is what workers import, whatever the others say of themselves.
    """
    package = find_spec("onnxruntime")
    if package is None or package.origin is None:
        return ""
    for file in _FILES:
        with suppress(OSError, UnicodeDecodeError):
            found = _VERSION.search((Path(package.origin).parent / file).read_text(encoding="utf-8"))
            if found is not None:
                return f"onnxruntime {found[1]}"
    return ""
