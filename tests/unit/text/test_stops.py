"""The output ends before the first stop string that is complete, wherever pieces are cut."""

from collections.abc import Iterator, Sequence

import pytest

from kvmesh.text.stops import StopStrings


def fed(stops: Sequence[str], parts: Sequence[str]) -> tuple[list[str], bool]:
    """What comes out piece by piece, with the rest at the end, and whether a stop was reached."""
    strings, out = StopStrings(stops), []
    for part in parts:
        text, stopped = strings.push(part)
        out.append(text)
        if stopped:
            return out, True
    return [*out, strings.flush()], False


def cuts_of(text: str) -> Iterator[list[str]]:
    """Every way to cut a text into pieces."""
    for bits in range(1 << (len(text) - 1)):
        parts, begin = [], 0
        for at in range(1, len(text)):
            if bits >> (at - 1) & 1:
                parts.append(text[begin:at])
                begin = at
        yield [*parts, text[begin:]]


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (["END"], "abENDcd", "ab", True),
        (["END"], "abENcd", "abENcd", False),
        (["END"], "abEN", "abEN", False),
        (["END"], "ENENDx", "EN", True),
        (["aab"], "aaab", "a", True),
        (["abcd", "bc"], "xabcd", "xa", True),
        (["abc", "bc"], "xabcd", "x", True),
        (["\n\n"], "a\n\n\nb", "a", True),
        (["é😀"], "aé😀b", "a", True),
        (["x"], "x", "", True),
        ([], "abc", "abc", False),
    ],
)
def test_it_makes_no_difference_where_pieces_are_cut(stops: list[str], text: str, shown: str, stopped: bool) -> None:
    for parts in cuts_of(text):
        out, ended = fed(stops, parts)
        assert ("".join(out), ended) == (shown, stopped)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert fed(["END"], ["abE", "N", "x", "E"]) == (["ab", "", "ENx", "", "E"], False)


def test_what_was_held_back_is_given_once() -> None:
    strings = StopStrings(["END"])
    strings.push("E")
    assert strings.flush() == "E"
    assert strings.flush() == ""
