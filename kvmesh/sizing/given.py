"""What a sizing starts from: the load, the targets, and what one pipeline and one decoder can do."""

import math
from dataclasses import dataclass

from kvmesh.sizing.lengths import Lengths


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decode step by the rooms in it: level up to the first point, straight lines from point to point and on."""

    points: tuple[tuple[float, float], ...]
    """(rooms, seconds), at least one; both rise."""

    def __call__(self, rooms: float) -> float:
        """Seconds of a step with so many rooms."""
        if len(self.points) == 1 or rooms <= self.points[0][0]:
            return self.points[0][1]
        right = next((i for i, (n, _) in enumerate(self.points) if n >= rooms), len(self.points) - 1)
        (n0, s0), (n1, s1) = self.points[right - 1], self.points[right]
        return s0 + (s1 - s0) * (rooms - n0) / (n1 - n0)


@dataclass(frozen=True, kw_only=True)
class Given:
    """Everything but how many requests, pipelines and decoders."""

    prompt: Lengths
    output_tokens: float
    """Mean of what is answered."""
    max_output_tokens: int
    """What clients ask for at most: decoders reserve pages for all of it."""

    first_token_seconds: float
    """Target: 95 % of first tokens come within it."""
    token_gap_seconds: float = math.inf
    """Target: 95 % of the gaps between two tokens are at most this long."""

    prefill_rate: float
    """Prompt tokens a second of a pipeline that has enough of them: the rate of its slowest stage."""
    num_stages: int
    step_tokens: int
    """Most prompt tokens of one step."""
    pipeline_pages: int
    """Of each stage."""

    step_seconds: StepTimes
    """Of a decoder."""
    decoder_pages: int
    max_running_rooms: int
    """Rooms that hold pages of a decoder at once."""

    page_size: int
    """Tokens in a page."""
    kv_bytes_per_token: float = 0.0
    """Over all layers. 0: not known; sending KV then takes no time."""
    link_bytes_per_second: float = math.inf
    """Of KV that one member can send, or receive."""
    overhead_seconds: float = 0.0
    """Of a first token, beside all that is computed here: gateway, registry, network."""

    def prefill_seconds(self, prompt_len: float) -> float:
        """Of a prompt that is alone: through the slowest stage, and its last step through the others."""
        last_step = min(prompt_len, self.step_tokens)
        return (prompt_len + (self.num_stages - 1) * last_step) / self.prefill_rate

    def link_seconds(self, prompt_len: float) -> float:
        """Of a prompt's KV at its decoder's door."""
        return prompt_len * self.kv_bytes_per_token / self.link_bytes_per_second

    def transfer_tail_seconds(self, prompt_len: float) -> float:
        """Of KV after the last compute: that of the last step, or what a link slower than the pipeline has left to send."""
        last_step = min(prompt_len, self.step_tokens)
        behind = self.link_seconds(prompt_len) - (prompt_len - last_step) / self.prefill_rate
        return max(self.link_seconds(last_step), behind)

    def prompt_pages(self, prompt_len: float) -> int:
        """Of each stage, for one room."""
        return math.ceil(prompt_len / self.page_size)

    def room_pages(self, prompt_len: float) -> int:
        """Of a decoder, for one room: prompt and the longest answer, reserved whole."""
        return math.ceil((prompt_len + self.max_output_tokens) / self.page_size)
