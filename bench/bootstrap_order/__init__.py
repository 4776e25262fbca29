"""How do the stages of a prefill pipeline agree on what is bootstrapped? Four protocols on the same traffic and latency.

`python -m bench.bootstrap_order --json` counts; `python -m bench.bootstrap_order.plot` draws what it printed.
docs/bootstrap-order.md says what is modelled and what is not.

    traffic.py      requests, and when each message of a decoder arrives where: the same for all protocols
    stages.py       what each stage knows by itself: told, aborted, timed out
    agreements.py   look-up (independent, last_first) and ring: who admits what in which iteration
    loop.py         the lock-step micro-batch loop that those three share
    mesh.py         kvmesh: its own Scheduler, AppliedLog and DecoderRooms on virtual time
    outcome.py      what a run counts, and its summary
"""
