"""Waiting for what tells of itself: the end of a process that is no child of the test's own."""

import asyncio
import os


async def process_end(pid: int, timeout_seconds: float = 10) -> None:
    """Waits until a process has ended; at once where there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ended.set)
        await asyncio.wait_for(ended.wait(), timeout_seconds)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
