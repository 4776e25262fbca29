"""The checksum of KV frames: XXH3-64, the fastest checked hash here and strong enough for damage (not for malice).

Called by `frames` only. It knows nothing of headers: it hashes parts in order as if they were one.
"""

import xxhash


def checksum(*parts: bytes | bytearray | memoryview) -> int:
    """XXH3-64 over the parts one after another, without joining them."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
