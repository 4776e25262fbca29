"""`kvmesh up`: a whole mesh on one machine, until Ctrl-C or until it has answered one prompt.

Resolves the model once, starts the services, tells who is registered and paired in the order it happened, and ends everything
in order. A first signal drains, a second kills. The supervision itself is in `mesh.py`.
"""

import argparse
import asyncio
import shlex
import shutil
import signal
import tempfile
from contextlib import aclosing
from pathlib import Path
from time import monotonic

import uvloop
from rich.console import Console

from kvmesh.cli.answer import tell, time_split
from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.news import News
from kvmesh.cli.processes import Child, ChildDied, how_ended
from kvmesh.cli.shape import ANY_PORT, BOOTSTRAP_LISTEN, GATEWAY_LISTEN, Shape
from kvmesh.cli.tls_given import add_tls_flags, tls_given, tls_words
from kvmesh.cli.watch import pictures, standing_pairs, until_ready
from kvmesh.client import Client
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.layout import DTYPE_BYTES
from kvmesh.model.source import is_converted, resolve
from kvmesh.rpc.tasks import race

_LAST_LINES = 15
"""Shown of a dead child's log."""
_KILLED_EXIT = 130
_WELL = (0, -signal.SIGTERM)
"""How a child ends that was asked to: drained, or at once, while it was still starting."""

_STYLES = {
    "lost": "red",
    "over": "red",
    "parted": "red",
    "failed": "red",
    "admitted": "green",
    "paired": "green",
    "ready": "bold green",
}
"""Colour of a line, by the first of these words it holds."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", cache_dir: Path) -> None:
    """Adds the command and its flags."""
    up = commands.add_parser("up", help="a whole mesh on this machine", description=__doc__)
    up.add_argument("--model", default="smollm2", help="smollm2, a GGUF file, or a Hugging Face directory")
    up.add_argument("--pp", type=_at_least_1, default=2, help="stages of a pipeline (default %(default)s)")
    up.add_argument("--pipelines", type=_at_least_1, default=1, help="pipelines (default %(default)s)")
    up.add_argument("--decoders", type=_at_least_1, default=1, help="decoders (default %(default)s)")
    up.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="fp32", help="weights, activations and KV")
    up.add_argument(
        "--stage-threads", type=_at_least_1, default=1, help="compute threads of a stage (default %(default)s)"
    )
    up.add_argument("--decoder-threads", type=_at_least_1, default=2, help="and of a decoder (default %(default)s)")
    up.add_argument("--prompt", help="answer this once, show where the time went, and end")
    up.add_argument("--max-tokens", type=_at_least_1, default=256, help="of that answer (default %(default)s)")
    up.add_argument("--restart", action="store_true", help="start a dead child again instead of ending the mesh")
    up.add_argument("--listen", help=f"the gateway's address (default {GATEWAY_LISTEN}; with --prompt a free port)")
    up.add_argument(
        "--bootstrap-listen", help=f"the registry's (default {BOOTSTRAP_LISTEN}; with --prompt a free port)"
    )
    up.add_argument(
        "--state-dir", type=Path, help="keeps the registry's state and all logs (default: a directory that goes)"
    )
    up.add_argument("--cache-dir", type=Path, default=cache_dir, help="keeps converted models (default %(default)s)")
    up.add_argument("--drain-seconds", type=float, default=10.0, help="time to finish at the end (default %(default)s)")
    up.add_argument("--start-seconds", type=float, default=300.0, help="time to get ready (default %(default)s)")
    add_tls_flags(up, "the links between decoders and stages have TLS")
    up.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        BadConfig: the model or a file of TLS is unusable.
    """
    tls_given(flags)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    _resolve(flags, console)
    directory = flags.state_dir or Path(tempfile.mkdtemp(prefix="kvmesh-"))
    code = uvloop.run(_Up(flags, directory, console).live())
    if flags.state_dir is None and code in (0, _KILLED_EXIT):
        shutil.rmtree(directory)
    elif code:
        console.print(f"logs: {directory}")
    return code


class _Up:
    """One run of the command."""

    def __init__(self, flags: argparse.Namespace, directory: Path, console: Console) -> None:
        self._flags = flags
        self._console = console
        self._began = monotonic()
        self._shape = _shape(flags)
        self._mesh = LocalMesh(self._shape, directory, restarted=self._restarted if flags.restart else None)
        self._asked_to_end = asyncio.Event()
        self._paired = asyncio.Event()
        self._code = 0

    async def live(self) -> int:
        """Runs the mesh to its end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with self._mesh:
                self._say(f"started: {', '.join(self._mesh.children)}")
                await race(self._mesh.watch(), self._follow(), self._work(), self._end())
        except ChildDied as died:
            self._tell_death(died.child, str(died))
            self._code = self._code or 1
        except KvmeshError as error:
            self._say(f"failed: {error.message}")
            self._code = self._code or 1
        for name, code in self._mesh.exit_codes.items():
            if code not in _WELL and self._code == 0:
                self._tell_death(self._mesh.children[name], f"{name} {how_ended(code)} when asked to end")
                self._code = 1
        return self._code

    def _on_signal(self) -> None:
        if self._asked_to_end.is_set():
            self._say("killed")
            self._code = _KILLED_EXIT
            self._mesh.kill_now()
        self._asked_to_end.set()

    async def _end(self) -> None:
        await self._asked_to_end.wait()
        self._say("ending: gateway, decoders, stages, registry")
        if self._flags.prompt is not None:
            self._code = _KILLED_EXIT

    async def _follow(self) -> None:
        """Tells what happens, in the order it happens."""
        news = News()
        async with aclosing(pictures(self._mesh.registry)) as followed:
            async for picture in followed:
                for line in news.since(picture):
                    self._say(line)
                if standing_pairs(picture) >= self._shape.pipelines * self._shape.decoders:
                    self._paired.set()

    async def _work(self) -> None:
        """What the mesh is up for."""
        try:
            with self._console.status("starting"):
                async with asyncio.timeout(self._flags.start_seconds):
                    await self._mesh.serving()
                    await self._paired.wait()
                    await until_ready(self._mesh.health("gateway"))
        except TimeoutError:
            raise Unavailable(f"not ready within {self._flags.start_seconds:g} s; logs: {self._mesh.logs}") from None
        self._say(f"ready: gateway {self._mesh.gateway}")
        if self._flags.prompt is not None:
            await self._answer(self._flags.prompt)
            return
        self._show_use()
        await asyncio.Event().wait()

    async def _answer(self, prompt: str) -> None:
        self._console.print(f"\n> {prompt}\n", style="bold")
        async with Client(self._mesh.gateway) as client:
            pieces = client.generate(
                messages=[{"role": "user", "content": prompt}], max_output_tokens=self._flags.max_tokens
            )
            end = await tell(pieces, lambda text: self._console.print(text, end=""))
        self._console.print("\n")
        self._console.print(time_split(end))

    def _show_use(self) -> None:
        self._console.print(f"\n  kvmesh chat --gateway {self._mesh.gateway}")
        self._console.print(f"  kvmesh status --bootstrap {self._mesh.registry}")
        doors = f"--gateway {self._mesh.gateway} --bootstrap {self._mesh.registry}"
        self._console.print(f"  kvmesh trace {shlex.join([*doors.split(), *tls_words(self._flags)])} ROOM")
        self._console.print(f"  logs: {self._mesh.logs}\n\nCtrl-C ends the mesh.")

    def _restarted(self, child: Child, died: ChildDied) -> None:
        self._tell_death(died.child, str(died))
        self._say(f"{child.spec.name} is started again")

    def _tell_death(self, child: Child, how: str) -> None:
        self._say(f"{how}; its last lines:", "red")
        for line in child.last_lines(_LAST_LINES):
            self._console.print(f"    {line}")

    def _say(self, line: str, style: str | None = None) -> None:
        style = style or next((s for word, s in _STYLES.items() if word in line), None)
        self._console.print(f"{monotonic() - self._began:6.2f} s  {line}", style=style)


def _shape(flags: argparse.Namespace) -> Shape:
    once = flags.prompt is not None
    return Shape(
        model=flags.model,
        cache_dir=flags.cache_dir,
        pp=flags.pp,
        pipelines=flags.pipelines,
        decoders=flags.decoders,
        dtype=flags.dtype,
        stage_threads=flags.stage_threads,
        decoder_threads=flags.decoder_threads,
        bootstrap_listen=flags.bootstrap_listen or (ANY_PORT if once else BOOTSTRAP_LISTEN),
        gateway_listen=flags.listen or (ANY_PORT if once else GATEWAY_LISTEN),
        drain_seconds=flags.drain_seconds,
        stage_flags=tls_words(flags),
        decoder_flags=tls_words(flags),
    )


def _resolve(flags: argparse.Namespace, console: Console) -> None:
    """Finds the model, and converts it once, before so many processes ask for it."""
    began = monotonic()
    if not is_converted(flags.model, flags.cache_dir):
        console.print(f"converting {flags.model}, once, into {flags.cache_dir}")
    files = resolve(flags.model, flags.cache_dir)
    console.print(f"model {files.name}: {files.config.num_layers} layers ({monotonic() - began:.1f} s)")


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
