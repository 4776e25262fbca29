"""How much of the time that KV takes on its way is hidden behind the prefill? `python -m bench.kv_overlap --json`

A mesh of real processes answers long prompts, one at a time. What is not hidden is the tail: from the end of a room's last
compute (at the last stage: of the step that held its last tokens) until decode may start (at the decoder: all shards verified
and written, the first token there). All processes are on this host, so their spans' times are of one clock. Set against it is
the time that the KV of such a room takes by itself: the same frames, through the product's own code, from an idle process to
another; measured before each request, so that both see the same machine.

    link.py       a process that sends a room's frames when asked, and how fast they come
    tails.py      the tail of a room and its parts, from the spans
"""
