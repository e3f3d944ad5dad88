from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.api.http.detokenizer import StopFinder

LETTERS = st.text(alphabet="ab€", max_size=12)


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read one character at a time and look back for a stop, the longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


def cut_in_pieces(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    given_out = []
    for piece in pieces:
        given_out.append(finder.push(piece))
        if finder.is_found:
            return given_out, True
    return [*given_out, finder.flush()], False


@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4),
)
@example(pieces=["a", "b", "c", "d", "e"], stops=["bcd", "abcde"])
@example(pieces=["abcde"], stops=["abcde", "bcd"])
def test_pieces_do_not_change_where_text_is_cut(pieces, stops):
    given_out, is_found = cut_in_pieces(pieces, stops)
    assert ("".join(given_out), is_found) == cut_by_hand("".join(pieces), stops)


def test_only_what_could_become_a_stop_is_held_back():
    finder = StopFinder(["END", "\n\n"])
    pieces = ["one E", "N", "d", " x\n", "y"]
    assert [finder.push(piece) for piece in pieces] == ["one ", "", "ENd", " x", "\ny"]
    assert finder.flush() == ""


def test_text_after_a_stop_is_dropped():
    finder = StopFinder(["END"])
    assert finder.push("the EN") == "the "
    assert finder.push("D of it") == ""
    assert finder.is_found
    assert finder.flush() == ""


def test_without_stops_nothing_is_held_back():
    finder = StopFinder([])
    assert finder.push("anything") == "anything"
    assert finder.flush() == ""
