"""`python -m services.gateway`: the door of the mesh."""

from kvmesh.model.source import resolve
from kvmesh.rpc.life import Life, main
from kvmesh.settings import load_or_exit
from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway


def make(settings: GatewaySettings, life: Life) -> Gateway:
    """Reads tokenizer and template and composes the service.

    Raises:
        BadConfig: the model is unusable.
    """
    return Gateway(settings, resolve(settings.model, settings.cache_dir), life)


if __name__ == "__main__":
    settings = load_or_exit(GatewaySettings, "services.gateway")
    main("gateway", settings, lambda life: make(settings, life), connection_seconds=settings.connection_seconds)
