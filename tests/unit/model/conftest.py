"""The tiny models, each made once for all tests here."""

from collections.abc import Callable

import pytest

from tests.unit.model.tiny_models import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The tiny model of an architecture."""
    made: dict[str, Tiny] = {}

    def get(architecture: str) -> Tiny:
        if architecture not in made:
            made[architecture] = make_tiny(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get
