import pytest
import torch

from stages.engines.vllm_start import hide_broken_packages

hide_broken_packages()  # before a test module imports transformers
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.fakes.tiny_policy import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair():
    from tests.fakes.ranks import crew

    with crew(2) as group:
        yield group
