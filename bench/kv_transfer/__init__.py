"""How fast do pages of KV get from one process to another? `python -m bench.kv_transfer --json`

Each path has a pair of processes of its own, a source and a target, each with a `PagePool`, and moves the same rooms between
pages that are scattered anew at random on both sides: more bytes than a cache holds. Rounds of all paths take turns, and
ratios are medians of the ratios within a round, so that they compare one time with the same time. After each round,
outside the measured part, the target says what lies in every page that was to be written, and the source what should;
before it, the target's pages were wiped.

kvmesh's paths run its own code: the pool makes and writes the frames, a link of the prefill service sends them within the
decoder's credit, with the services' channels and allocator. What a peer moves lies as it lies in the engines that use it: one
block a page and layer, since the pool's own runs (a page of one head) would be a sixteenth of that, and slow. It copies
from pages to pages with no checksum. Raw sockets and the copy in memory know no pages either: they are what the machine gives.

    rooms.py          what is moved: rooms, and pages drawn at random
    content.py        pools: filled, wiped, and what lies in a page
    ends.py           what a path is to the bench: two ends
    side.py           the process of one end
    pair.py           the two processes of a path, and a round of it
    turns.py          rounds of all paths, by turns
    paths.py          all paths
    memory.py         one thread copies big tensors
    sockets.py        raw TCP
    link.py           kvmesh over gRPC, plain and with TLS
    certificates.py   made for one run
    mooncake.py       Mooncake's transfer engine over TCP
    nixl.py           NIXL over UCX: over TCP, and as it chooses on one host
    usage.py          memory of a process
    outcome.py        rounds become the figures
"""
