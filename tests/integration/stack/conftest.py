"""One region for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from harness.cluster.stack import DevStack, region


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Two agents: `plain-cpu`, and `edge-npu`, which is emulated."""
    with region(tmp_path_factory.mktemp("stack"), 2) as found:
        yield found
