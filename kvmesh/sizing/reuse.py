"""Whether KV that lies elsewhere is cheaper to move or to compute anew. docs/recompute-or-move.md explains it.

Called by whoever weighs the two (so far only that page); pure arithmetic on what was measured.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a pipeline's slowest stage takes over prompt tokens; the other stages work at the same time."""

    token_seconds: float
    """Of a token without context."""
    context_seconds: float = 0.0
    """More, for each token of context before it: attention."""
    step_seconds: float = 0.0
    """More, for each step, however full."""
    step_tokens: int = 128
    """Of a full step."""

    def seconds(self, num_tokens: float) -> float:
        """Of the first so many tokens of a prompt. A part of a step counts as that part: what follows fills it."""
        return num_tokens * (self.alone_seconds + self.context_seconds * num_tokens / 2)

    def rate(self, context: float) -> float:
        """Tokens a second behind so many tokens of context."""
        return 1 / (self.alone_seconds + self.context_seconds * context)

    @property
    def alone_seconds(self) -> float:
        """Of a token without context, with its part of a step."""
        return self.token_seconds + self.step_seconds / self.step_tokens


@dataclass(frozen=True, kw_only=True)
class Move:
    """How long KV takes from one member's pages to another's."""

    link_bytes_per_second: float
    """Copies out and in and checksums included: the rate of the whole way."""
    kv_bytes_per_token: float
    """On the wire, over all layers."""
    latency_seconds: float = 0.0
    """Before the first byte."""
    tail_seconds: float = 0.0
    """From the last byte until it may be used."""

    def seconds(self, num_tokens: float) -> float:
        """Of so many tokens; of none nothing is asked for."""
        return self.fixed_seconds + num_tokens * self.token_seconds if num_tokens else 0.0

    @property
    def token_seconds(self) -> float:
        """Each token's own."""
        return self.kv_bytes_per_token / self.link_bytes_per_second

    @property
    def fixed_seconds(self) -> float:
        """What any transfer takes."""
        return self.latency_seconds + self.tail_seconds


def break_even_tokens(compute: Compute, move: Move) -> float:
    """From so many cached tokens on, moving takes no longer than computing; `inf`: never, since the link is too slow."""
    # context/2 n² + gain n - fixed = 0: computing grows with the square of the length, moving does not.
    half, gain, fixed = compute.context_seconds / 2, compute.alone_seconds - move.token_seconds, move.fixed_seconds
    if half == 0:
        return fixed / gain if gain > 0 else math.inf
    root = math.sqrt(gain * gain + 4 * half * fixed)
    # The form without cancellation, on either side.
    return 2 * fixed / (gain + root) if gain > 0 else (root - gain) / (2 * half)
