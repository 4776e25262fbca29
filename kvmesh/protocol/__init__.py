"""The room protocol, pure: events in, new state and actions out.

The services wire actions to RPCs, a simulator can wire them to a seeded network. Standard library and `kvmesh.errors` only:
no clock, no I/O, no asyncio, no randomness.
"""
