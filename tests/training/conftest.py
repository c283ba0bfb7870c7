"""A random tiny model, for all that run verl or its rollout for real."""

from pathlib import Path

import pytest
from toy_rl import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
