"""What every test may use: a tiny random model, made once; and Ctrl-C that is heard."""

import signal
from pathlib import Path

import pytest

# A shell without job control starts what runs in its background with SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama; see tests/tiny_model.py."""
    from tests.tiny_model import write_tiny_model  # noqa: PLC0415  # takes seconds, and only where a model is needed

    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
