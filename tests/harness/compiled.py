"""What a test asks of modules that `make test-compiled` compiles."""

import pytest

from shoal.host.compiled import is_compiled

interpreted_frames = pytest.mark.skipif(
    is_compiled("shoal.agent.frames.format"),
    reason="it replaces a name inside a module, or refers weakly to an object: not with compiled ones (decision 38)",
)
