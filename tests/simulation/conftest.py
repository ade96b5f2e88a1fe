"""Options of the seeded runs."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=int(os.environ.get("SHOAL_SEEDS", "60")), help="seeded runs to play")
    parser.addoption(
        "--trade-seeds", type=int, default=int(os.environ.get("SHOAL_TRADE_SEEDS", "150")), help="seeded trades to play"
    )
    parser.addoption(
        "--matrix-seeds", type=int, default=int(os.environ.get("SHOAL_MATRIX_SEEDS", "72")), help="cells to play"
    )
    parser.addoption(
        "--cross-region-seeds",
        type=int,
        default=int(os.environ.get("SHOAL_CROSS_REGION_SEEDS", "40")),
        help="moves between regions to play",
    )
    parser.addoption(
        "--request-seeds",
        type=int,
        default=int(os.environ.get("SHOAL_REQUEST_SEEDS", "50")),
        help="seeded runs about requests to play",
    )
    parser.addoption("--first-seed", type=int, default=int(os.environ.get("SHOAL_FIRST_SEED", "0")))


def _seeds_of(request: pytest.FixtureRequest, option: str) -> range:
    first, count = (int(str(request.config.getoption(name))) for name in ("--first-seed", option))
    return range(first, first + count)


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    return _seeds_of(request, "--seeds")


@pytest.fixture
def trade_seeds(request: pytest.FixtureRequest) -> range:
    return _seeds_of(request, "--trade-seeds")


@pytest.fixture
def matrix_seeds(request: pytest.FixtureRequest) -> range:
    return _seeds_of(request, "--matrix-seeds")


@pytest.fixture
def cross_region_seeds(request: pytest.FixtureRequest) -> range:
    return _seeds_of(request, "--cross-region-seeds")


@pytest.fixture
def request_seeds(request: pytest.FixtureRequest) -> range:
    return _seeds_of(request, "--request-seeds")
