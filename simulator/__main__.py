"""`python -m simulator`: proves, or replays one run and tells its story.

--prove [--short]           everything: see docs/simulator.md
--seed N [--scale large]    one run at random, again
--plan FILE                 one run from a plan, such as a failing run prints
"""

import argparse
import sys
from pathlib import Path

from simulator.plan import Plan, draw
from simulator.prove import FULL, SCALES, SHORT, prove
from simulator.run import Run
from simulator.shrink import shrink
from simulator.timeline import story
from simulator.violation import Violation


def main() -> int:
    """Returns the exit status: 1 when an invariant is broken."""
    parser = argparse.ArgumentParser("python -m simulator", description="The mesh's protocol on virtual time.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prove", action="store_true", help="search the small worlds whole, and run all seeds")
    what.add_argument("--seed", type=int, help="run one seed again")
    what.add_argument("--plan", type=Path, help="run a plan, as JSON, again")
    parser.add_argument("--short", action="store_true", help="with --prove: seconds instead of minutes")
    parser.add_argument("--scale", choices=SCALES, default="small", help="with --seed: of which scale it is")
    parser.add_argument("--story", action="store_true", help="tell what happened even if all is well")
    args = parser.parse_args()
    if args.prove:
        evidence = prove(SHORT if args.short else FULL)
        print("\n".join(evidence.lines()))
        return 0 if evidence.holds else 1
    try:
        plan = Plan.from_json(args.plan.read_text()) if args.plan else draw(args.seed, SCALES[args.scale])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--plan {args.plan} is no plan: {error}")
    return _replay(plan, tell=args.story)


def _replay(plan: Plan, *, tell: bool) -> int:
    run = Run(plan)
    try:
        seen = run.run()
    except Violation as violation:
        print(f"{violation}\n\nshrinking …")
        _tell_smallest(shrink(plan, violation))
        return 1
    if tell:
        print("\n".join(f"{time:9.4f}  {name:<14} {text}" for time, name, text, _ in run.world.witness.notes))
    print(f"all well: {seen.events:,} events, faults {dict(seen.faults)}, requests ended {dict(seen.ends)}")
    return 0


def _tell_smallest(plan: Plan) -> None:
    run = Run(plan)
    try:
        run.run()
    except Violation as violation:
        print(f"\nthe smallest plan found: {len(plan.wishes)} requests, {len(plan.faults)} faults\n{plan.to_json()}\n")
        print("\n".join(story(run.world.witness, violation)))
        print(violation)


if __name__ == "__main__":
    sys.exit(main())
