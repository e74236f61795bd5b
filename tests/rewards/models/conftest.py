"""What tests of scorers behind servers share."""

import pytest

from agentenv.rewards.models import request_queue
from tests.models import make_tiny_tokenizer


@pytest.fixture
def soon(monkeypatch):
    """Retries wait a millisecond."""
    monkeypatch.setattr(request_queue, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    return folder
