"""Which of a stage's links end when a decoder dials: at most one for each decoder process stands, the newest pairing's.

Called by the stage's generation and the simulator, which own the links.
"""

from collections.abc import Collection, MutableMapping

from kvmesh.errors import Fenced
from kvmesh.protocol.ids import Incarnation, PairingKey, PairingNumber


def replaced_by(
    key: PairingKey, standing: Collection[PairingKey], newest: MutableMapping[Incarnation, PairingNumber]
) -> list[PairingKey]:
    """The links that a new one replaces: the decoder's older ones.

    Args:
        newest: of each decoder, the pairing that dialled last in this generation; noted here. A number is used once: what the
            worker still copies for a link that ended must not reach its successor.

    Raises:
        Fenced: this pairing, or a newer one, has dialled before.
    """
    decoder, number = key
    if newest.get(decoder, 0) >= number:
        raise Fenced(f"pairing {number} is not newer than {newest[decoder]}", reason="stale_pairing")
    newest[decoder] = number
    return [k for k in standing if k[0] == decoder]
