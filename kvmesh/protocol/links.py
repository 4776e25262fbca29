"""Which of a stage's links end when a decoder dials: at most one for each decoder process stands, the newest pairing's.

Called by the stage's generation and the simulator, which own the links.
"""

from collections.abc import Collection

from kvmesh.errors import Fenced
from kvmesh.protocol.ids import PairingKey


def replaced_by(key: PairingKey, standing: Collection[PairingKey]) -> list[PairingKey]:
    """The links that a new one replaces: the decoder's older ones.

    Raises:
        Fenced: a link of this or a newer pairing stands.
    """
    older = [k for k in standing if k[0] == key[0]]
    newest = max((k[1] for k in older), default=0)
    if newest >= key[1]:
        raise Fenced(f"pairing {key[1]} is not newer than the standing {newest}", reason="stale_pairing")
    return older
