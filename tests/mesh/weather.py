"""What the network does to the packets of one edge. An edge has a direction: there and back are two."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Of each packet: how long it takes, and whether it arrives. Packets overtake each other."""

    least_ms: float = 0.0
    most_ms: float = 0.0
    """Each delay between the two is as likely."""
    loss_percent: float = 0.0


Forecast = Callable[[str, str], Weather | None]
"""The weather from one host to another; None for a clear sky."""
