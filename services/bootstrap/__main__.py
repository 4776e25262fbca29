"""`python -m services.bootstrap`: the registry."""

from kvmesh.rpc.life import main
from kvmesh.settings import load_or_exit
from services.bootstrap.bootstrap import Bootstrap
from services.bootstrap.config import BootstrapSettings

if __name__ == "__main__":
    settings = load_or_exit(BootstrapSettings, "services.bootstrap")
    main("bootstrap", settings, lambda life: Bootstrap(settings, life))
