"""From a plan that fails to a small one that fails alike: leaves things out as long as the invariant still breaks."""

from time import monotonic

from simulator.plan import Plan, smaller
from simulator.run import Run
from simulator.witness import Violation


def violation_of(plan: Plan) -> Violation | None:
    """How a plan fails; None when it does not."""
    try:
        Run(plan, noting=False).run()
    except Violation as violation:
        return violation
    return None


def shrink(plan: Plan, invariant: int, limit_seconds: float = 60.0) -> Plan:
    """A plan of which nothing can be left out, or the smallest found in the time.

    Args:
        invariant: what the plan breaks.
    """
    until = monotonic() + limit_seconds
    shrinking = True
    while shrinking and monotonic() < until:
        shrinking = False
        for candidate in smaller(plan):
            failed = violation_of(candidate)
            if failed is not None and failed.invariant == invariant:
                plan, shrinking = candidate, True
                break
            if monotonic() >= until:
                break
    return plan
