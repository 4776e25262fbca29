"""The mesh on virtual time: the protocol's own machines over a seeded network that delays, reorders, breaks and partitions.

Nothing here opens a socket or reads a clock. `python -m simulator` runs it; docs/simulator.md says what is modelled.
"""
