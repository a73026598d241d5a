from __future__ import annotations

import os

import pytest
import torch

from tests.budget import Budget
from tests.fakes import tiny_target
from whiflash_infer.target import Target

# Threads cost more than they bring at these sizes, the more so beside other work.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(str(tmp_path_factory.mktemp("targets")))


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "write the numbers of collected tests to tests/collected.json"
    parser.addoption("--write-collected", action="store_true", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """One thread: tiny tensors gain nothing from more, and busy machines lose much."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    config.pluginmanager.register(Budget(config), "budget")
