"""The federation in containers, once for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from harness.compose import Compose, federation


@pytest.fixture(scope="session")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with federation(tmp_path_factory.mktemp("compose") / "home") as found:
        yield found
