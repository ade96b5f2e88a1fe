"""Three regions and their federation, for all tests that leave them as they were."""

from collections.abc import Iterator

import pytest

from harness.cluster.stack import DevStack, region


@pytest.fixture(scope="package")
def neighbourhood(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """`home`, where the model `relu` is, `home-2` and `home-3`: an agent each, at half and a third of home's price."""
    with region(tmp_path_factory.mktemp("neighbourhood"), 1, regions=3, federation=1) as found:
        yield found
