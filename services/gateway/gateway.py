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
from services.gateway.attempts import Attempts
from services.gateway.config import GatewaySettings
from services.gateway.decoders import Decoders
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
        name = settings.model_name or files.name
        tokenizer = Tokenizer.open(files)
        template = ChatTemplate.open(files, tokenizer)
        self._view = MeshView(settings.bootstrap, settings.watchdog_seconds, files.fingerprint, self._look)
        self._registry = dial(settings.bootstrap, watchdog_seconds=settings.watchdog_seconds)
        self._decoders = Decoders(settings.watchdog_seconds)
        self._servicer = InferenceServicer(
            tokenizer,
            Validator(name, tokenizer, template, eos_ids=files.eos_ids, max_positions=files.config.max_positions),
            self._view,
            Attempts(self._registry, self._decoders, model=name),
            model_name=name,
            request_seconds=settings.request_seconds,
            max_attempts=settings.max_attempts,
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

    async def _look(self) -> None:
        """A new picture of the mesh: ready while some pair stands."""
        why_not = self._view.why_not_ready
        self._life.set_ready(not why_not, why_not)
        await self._decoders.keep(self._view.decoders)
