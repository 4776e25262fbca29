"""Which decoders one stage is linked to: at most one link for each decoder process, the newest pairing's.

Called by the stage's generation and the simulator, which own the streams.
"""

from dataclasses import dataclass, field

from kvmesh.errors import Fenced
from kvmesh.protocol.scheduler import PairingKey


@dataclass(slots=True)
class LinkBook:
    """The links of one stage in one generation."""

    _keys: set[PairingKey] = field(default_factory=set)

    def __contains__(self, key: PairingKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def open(self, key: PairingKey) -> list[PairingKey]:
        """A decoder dials. Returns the keys of its older links, which are over.

        Raises:
            Fenced: a link of this or a newer pairing stands.
        """
        older = [k for k in self._keys if k[0] == key[0]]
        newest = max((k[1] for k in older), default=0)
        if newest >= key[1]:
            raise Fenced(f"pairing {key[1]} is not newer than the standing {newest}", reason="stale_pairing")
        self._keys.difference_update(older)
        self._keys.add(key)
        return older

    def close(self, key: PairingKey) -> None:
        """A link's stream ended. Late, of one that was replaced: nothing."""
        self._keys.discard(key)
