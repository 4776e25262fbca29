"""What must hold when all is quiet: the mesh whole, idle, and of one log.

Called at the end of a run and of every explored path. Here the machines' own books are read: that they are empty is the claim.
"""

from collections.abc import Mapping

from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.rooms import DecoderRooms
from kvmesh.protocol.scheduler import Scheduler
from simulator.decoder import DecoderProcess
from simulator.gateway import GatewayProcess
from simulator.mesh import Mesh
from simulator.registry import RegistryProcess
from simulator.stage import StageProcess
from simulator.violation import Violation


def check_ended(mesh: Mesh) -> None:
    """Every request that came has ended.

    Raises:
        Violation: 6.
    """
    books = mesh.world.witness.requests
    still = [number for number, request in books.items() if request.end is None]
    if still:
        raise Violation(6, f"requests {still[:5]} never ended", *still[:5])


def check_idle(mesh: Mesh) -> None:
    """Nothing is left of any room, anywhere, and all stages of a pipeline have one log.

    Raises:
        Violation: 1, 2, 3 or 6.
    """
    for process in mesh.world.living.values():
        match process:
            case StageProcess():
                _check_stage(process)
            case DecoderProcess():
                _check_decoder(process)
            case GatewayProcess() if process.open:
                raise Violation(6, f"{process.name} has requests {list(process.open)} open", *process.open)
            case _:
                pass
    _check_logs(mesh)


def _check_stage(stage: StageProcess) -> None:
    if stage.local["steps"].items:
        raise Violation(2, f"{stage.name} has steps that wait for something")
    if stage.worker.log.rooms or stage.worker.log.free_pages != stage.shape.limits.num_pages:
        raise Violation(3, f"{stage.name} holds rooms {list(stage.worker.log.rooms)}", *stage.worker.log.rooms)
    part = stage.part
    if part is None or part.head is None:
        return
    scheduler, prompts = part.head.scheduler, part.head.prompts
    _audit(stage.name, scheduler)
    if not scheduler.idle or scheduler.free_pages != stage.shape.limits.num_pages:
        rooms = scheduler.states
        raise Violation(3, f"{stage.name} has rooms {rooms}, {scheduler.steps_in_flight} steps in flight", *rooms)
    if prompts:
        raise Violation(6, f"{stage.name} keeps prompts of rooms {list(prompts)}", *prompts)


def _check_decoder(decoder: DecoderProcess) -> None:
    books: DecoderRooms = decoder.books
    _audit(decoder.name, books)
    if books.states or books.free_pages != books.limits.num_pages:
        raise Violation(3, f"{decoder.name} holds rooms {books.states}", *books.states)
    copier = decoder.copier
    left: dict[str, Mapping[RoomId, object]] = {
        "its worker": decoder.worker.running,
        "its copier": copier.rooms,
        "its frames": copier.receiving.rooms,
        "its held pages": copier.receiving.held,
        "its calls": decoder.calls,
    }
    for where, rooms in left.items():
        if rooms:
            raise Violation(6, f"{decoder.name} keeps rooms {list(rooms)} at {where}", *rooms)


def _audit(name: str, books: Scheduler | DecoderRooms) -> None:
    try:
        books.check()
    except ValueError as error:
        raise Violation(3, f"{name}: {error}") from error


def _check_logs(mesh: Mesh) -> None:
    stages = [p for p in mesh.world.living.values() if isinstance(p, StageProcess) and p.life.serving]
    logs: dict[int, tuple[str, int, bytes]] = {}
    for stage in stages:
        log = (stage.worker.log.next_number, stage.worker.log.digest)
        first = logs.setdefault(stage.life.generation, (stage.name, *log))
        if first[1:] != log:
            said = f"{stage.name} has applied {log[0]} steps, {first[0]} {first[1]}; or their digests differ"
            raise Violation(1, said, stage.life.generation)


def check_whole(mesh: Mesh) -> None:
    """Every process lives; every pipeline serves, and is paired with every decoder.

    Raises:
        Violation: 6.
    """
    shape, world = mesh.shape, mesh.world
    missing = [name for name in mesh.names if name not in world.named]
    registry = world.process("registry")
    assert isinstance(registry, RegistryProcess), missing
    idle = [p.name for p in world.living.values() if isinstance(p, StageProcess) and not p.life.serving]
    pairs = len(registry.registry.mesh.pairs())
    if missing or idle or pairs != shape.pipelines * shape.decoders:
        raise Violation(6, f"{missing} are missing, {idle} serve nothing, {pairs} pairs stand")
