from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvtier.api.http.detokenizer import Detokenizer
from kvtier.testing.byte_model import ByteChatModel

BROKEN = "\ufffd"


def decode_bytes(ids: list[int]) -> str:
    return ByteChatModel().decode(ids)


def decode_byte_fallback(ids: list[int]) -> str:
    """As SentencePiece models do: a run of bytes that is not whole is broken byte by byte."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return BROKEN * len(ids)


def pieces_of(decode: Callable[[list[int]], str], ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    pieces = []
    sizes = sizes or [1]
    turn = 0
    while ids:
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
        turn += 1
    return [*pieces, detokenizer.flush()]


SIZES = st.lists(st.integers(1, 7), max_size=5)


@given(text=st.text(), sizes=SIZES)
@example(text="é€😀" * 40, sizes=[1])
@pytest.mark.parametrize("decode", [decode_bytes, decode_byte_fallback])
def test_text_comes_out_as_it_is_and_never_in_halves(decode, text, sizes):
    pieces = pieces_of(decode, list(text.encode()), sizes)
    assert "".join(pieces) == text
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@given(noise=st.binary(max_size=300), sizes=SIZES)
@example(noise=b"\x80" * 200 + b"ok", sizes=[1])
@example(noise=b"\xf0\x9f\x98" * 100, sizes=[1])
def test_garbage_comes_out_as_a_whole_decode_would_have_it(noise, sizes):
    assert "".join(pieces_of(decode_bytes, list(noise), sizes)) == decode_bytes(list(noise))


def test_a_character_that_never_ends_comes_out_broken_at_the_end():
    assert pieces_of(decode_bytes, [*b"ok", 0xF0, 0x9F], [1]) == [
        "o",
        "k",
        "",
        "",
        BROKEN,
    ]


def test_special_tokens_bring_no_text():
    assert "".join(pieces_of(decode_bytes, [104, 256, 105, 256], [1])) == "hi"


@pytest.mark.parametrize("ids", [list(b"word " * 1000), [0x80] * 5000, [256] * 5000])
def test_work_is_linear_in_the_length(ids):
    num_decoded = 0

    def decode(window: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(window)
        return decode_bytes(window)

    pieces_of(decode, ids, [1])
    assert num_decoded <= 40 * len(ids)


def test_tokens_that_straddle_characters_are_put_together():
    """Each token but the first ends in the middle of a character, so no boundary is ever clean."""
    emoji = "😀".encode()
    tokens = [emoji[:2], *[emoji[2:] + emoji[:2]] * 100, emoji[2:]]

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    pieces = pieces_of(decode, list(range(len(tokens))), [1])
    assert "".join(pieces) == "😀" * 101
    assert not any(BROKEN in piece for piece in pieces)
    assert max(len(piece) for piece in pieces) <= 2, "text is held back no longer than it must"


def test_a_trained_byte_level_tokenizer():
    text = "Zwölf Boxkämpfer 🥊 jagen Виктор quer über 東京 😀😀 " * 8
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    pieces = pieces_of(tokenizer.decode, tokenizer.encode(text).ids, [1])
    assert "".join(pieces) == text
    assert not any(BROKEN in piece for piece in pieces)


def test_a_leading_space_that_the_decoder_drops_is_kept_between_words():
    words = ["▁Hello", "▁world", "▁again"]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert "".join(pieces_of(decode, [0, 1, 2, 1], [1])) == "Hello world again world"
