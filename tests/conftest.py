from __future__ import annotations

import pytest
import torch

from tests.fakes import tiny_target
from whiflash_infer.target import Target

# Threads cost more than they bring at these sizes, the more so beside other work.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(str(tmp_path_factory.mktemp("targets")))
