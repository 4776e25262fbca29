"""scratch until the source lands"""
from pathlib import Path
from kvmesh.model.files import ModelFiles

def resolve(model: str, cache_dir: Path) -> ModelFiles:
    return ModelFiles.open(Path(model))
