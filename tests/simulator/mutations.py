"""Deliberately broken variants of the core: each breaks one rule, and the invariant it must be caught by is named beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import broken
from broken import Patch


@dataclass(frozen=True)
class Mutation:
    """One broken variant."""

    name: str
    invariant: int
    patches: Callable[[], list[Patch]]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The core is broken while this is entered."""
        patches = self.patches()
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        for owner, name, wrong in patches:
            setattr(owner, name, wrong)
        try:
            yield
        finally:
            for owner, name, whole in before:
                setattr(owner, name, whole)


MUTATIONS = [
    Mutation("rank 0 gives a step's number out twice", 1, broken.step_written_twice),
    Mutation("aborts are told to rank 0 only", 1, broken.aborts_told_to_rank_0_only),
    Mutation("work is scheduled before its room is admitted", 2, broken.admission_told_a_step_late),
    Mutation("a page is given out twice", 3, broken.page_given_out_twice),
    Mutation("a room ends and its pages stay taken", 3, broken.pages_forgotten_on_cancel),
    Mutation("late frames are written", 4, broken.late_frames_written),
    Mutation("the grant is not waited for", 4, broken.grant_not_waited_for),
    Mutation("a room is let go before the step that writes its pages is over", 4, broken.let_go_in_the_step),
    Mutation("what was put aside is dropped", 6, broken.put_aside_and_dropped),
    Mutation("a room counts as complete after one stage", 4, broken.complete_after_one_stage),
    Mutation("a frame is read from another room's pages", 4, broken.frames_read_after_the_end),
    Mutation("a replay forgets what the client has", 5, broken.output_forgotten_on_replay),
    Mutation("a replay skips a token", 5, broken.tokens_skipped),
    Mutation("a lost pairing is never made again", 6, broken.never_paired_again),
    Mutation("what runs is forgotten with a lease", 6, broken.held_generation_forgotten),
    Mutation("a lost room is never replaced", 5, broken.never_retried),
    Mutation("a decoder refuses every room", 6, broken.every_room_refused),
    Mutation("KV is sent before it is computed", 4, broken.sent_before_computed),
    Mutation("the index of the first token is not in the log", 5, broken.output_index_not_in_the_log),
    Mutation("first tokens are lost now and then", 6, broken.first_tokens_lost),
    Mutation("nobody watches a worker that hangs", 6, broken.no_watchdog),
    Mutation("a room that ended is admitted again", 3, broken.ended_rooms_forgotten),
    Mutation("a room is admitted only between rounds", 8, broken.admission_by_rounds),
    Mutation("rank 0 is paired first", 9, broken.head_paired_first),
]
