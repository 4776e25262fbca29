"""The real model, converted in the cache that the services use, so that it is made once for all of them."""

import os
from functools import cache
from pathlib import Path

from kvmesh.model.files import ModelFiles
from kvmesh.model.source import resolve


@cache
def smollm2_files() -> ModelFiles:
    """SmolLM2 as it is served."""
    return resolve("smollm2", Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")))
