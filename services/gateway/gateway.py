"""The gateway service: one process, composed. Called by `__main__`."""

from collections.abc import Sequence

import grpc

from kvmesh.model.files import ModelFiles
from kvmesh.rpc.channels import dial
from kvmesh.rpc.life import Life
from kvmesh.rpc.tasks import race
from kvmesh.text.template import ChatTemplate
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from services.gateway.attempts import Attempts, Decoders
from services.gateway.config import GatewaySettings
from services.gateway.mesh_view import MeshView
from services.gateway.servicer import InferenceServicer
from services.gateway.validation import Validator


class Gateway:
    """The service that `kvmesh.rpc.life` runs."""

    names: Sequence[str] = ("kvmesh.v1.InferenceService",)

    def __init__(self, settings: GatewaySettings, files: ModelFiles, life: Life) -> None:
        """Raises:
        BadConfig: tokenizer or template is unusable.
        """
        self._life = life
        self._fingerprint = files.fingerprint
        name = settings.model_name or files.name
        tokenizer = Tokenizer.open(files)
        template = ChatTemplate.open(files, tokenizer)
        self._view = MeshView(settings.bootstrap, settings.watchdog_seconds, self._look)
        self._registry = dial(settings.bootstrap, watchdog_seconds=settings.watchdog_seconds)
        self._decoders = Decoders(settings.watchdog_seconds)
        self._servicer = InferenceServicer(
            name,
            files.config.max_positions,
            tokenizer,
            Validator(name, tokenizer, template, files.eos_ids),
            self._view,
            Attempts(self._registry, self._decoders, settings.max_attempts),
            settings.request_seconds,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers Generate and ListModels."""
        add_InferenceServiceServicer_to_server(self._servicer, server)

    async def run(self, life: Life) -> None:
        """Follows the mesh until asked to leave and the requests it has are answered."""
        try:
            await race(self._view.run(), self._leave(life))
        finally:
            await self._decoders.close()
            await self._registry.close()

    async def _leave(self, life: Life) -> None:
        await life.draining.wait()
        await self._servicer.finish()

    def _look(self) -> None:
        """A new picture of the mesh: ready while some pair stands."""
        served = self._view.limits.model_fingerprint
        if served and served != self._fingerprint:
            self._life.set_ready(
                False, f"the mesh serves model {served}, this gateway tokenizes for {self._fingerprint}"
            )
            return
        self._life.set_ready(self._view.paired, "no pipeline and decoder are paired")
