"""`kvmesh chat`: a conversation with the mesh in the terminal. Ctrl-C cancels the answer, Ctrl-D ends.

Piped, each line of stdin is a turn, answers go to stdout and everything else to stderr.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable

from kvmesh.cli.answer import in_short, tell
from kvmesh.cli.shape import GATEWAY_LISTEN
from kvmesh.client import Client
from kvmesh.errors import KvmeshError

_YOU = "you> "


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its flags."""
    chat = commands.add_parser("chat", help="talk to a mesh", description=__doc__)
    gateway = os.environ.get("KVMESH_GATEWAY", GATEWAY_LISTEN)
    chat.add_argument("--gateway", default=gateway, help="the gateway's address [KVMESH_GATEWAY] (default %(default)s)")
    chat.add_argument("--system", help="what the model is told first")
    chat.add_argument("--max-tokens", type=int, default=512, help="of an answer (default %(default)s)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    chat.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    talk = Conversation(flags.gateway, flags.system, flags.max_tokens, flags.temperature)
    interactive = sys.stdin.isatty()
    with asyncio.Runner() as runner:
        while True:
            try:
                line = input(_YOU) if interactive else _next_line()
            except EOFError:
                print(end="\n" if interactive else "")
                return 0
            except KeyboardInterrupt:  # at the prompt: drop the line
                print()
                continue
            if not line.strip():
                continue
            try:
                told = runner.run(talk.turn(line, _write))
            except KeyboardInterrupt:
                print("\n(cancelled)", file=sys.stderr)
            except KvmeshError as error:
                print(error.message, file=sys.stderr)
                if not interactive:
                    return 1
            else:
                print(f"({told})", file=sys.stderr)


class Conversation:
    """What was said so far."""

    def __init__(self, gateway: str, system: str | None, max_tokens: int, temperature: float) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []
        self._gateway, self._max_tokens, self._temperature = gateway, max_tokens, temperature

    async def turn(self, line: str, write: Callable[[str], None]) -> str:
        """Says a line and streams the answer; returns how fast it was.

        Raises:
            KvmeshError: the answer failed; what came of it until then was said, without any the turn never happened.
        """
        asked = [*self.messages, {"role": "user", "content": line}]
        heard: list[str] = []

        def hear(text: str) -> None:
            heard.append(text)
            write(text)

        try:
            async with Client(self._gateway) as client:
                pieces = client.generate(
                    messages=asked, max_output_tokens=self._max_tokens, temperature=self._temperature
                )
                return in_short(await tell(pieces, hear))
        finally:
            if heard:
                self.messages = [*asked, {"role": "assistant", "content": "".join(heard)}]
                write("\n")


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
