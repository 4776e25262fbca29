"""From a plan that fails to a small one that fails alike: leaves things out as long as the invariant still breaks."""

import re
from time import monotonic

from simulator.plan import Plan, smaller
from simulator.run import Run
from simulator.violation import Violation


def violation_of(plan: Plan) -> Violation | None:
    """How a plan fails; None when it does not."""
    try:
        Run(plan, noting=False).run()
    except Violation as violation:
        return violation
    return None


def kind_of(violation: Violation) -> str:
    """What is broken, without whose it is: a message less its numbers and lists."""
    return re.sub(r"\[.*?\]|[\d.]+|'.*?'", "", str(violation))


def shrink(plan: Plan, violation: Violation, limit_seconds: float = 60.0) -> Plan:
    """A plan of which nothing can be left out, or the smallest found in the time.

    Args:
        violation: how the plan fails.
    """
    until = monotonic() + limit_seconds
    shrinking = True
    while shrinking and monotonic() < until:
        shrinking = False
        for candidate in smaller(plan):
            failed = violation_of(candidate)
            if failed is not None and kind_of(failed) == kind_of(violation):
                plan, shrinking = candidate, True
                break
            if monotonic() >= until:
                break
    return plan
