from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvtier.api.http.detokenizer import Detokenizer, continuation
from kvtier.testing.engine_service import ByteChatModel

BROKEN = "\ufffd"


def decode_bytes(ids: list[int]) -> str:
    return ByteChatModel().decode(ids)


def decode_byte_fallback(ids: list[int]) -> str:
    """As SentencePiece models do: a run of bytes that is not whole is broken byte by byte."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return BROKEN * len(ids)


def pieces_of(
    decode: Callable[[list[int]], str], ids: list[int], sizes: list[int], prompt: list[int] = ()
) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
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
    ids = list(text.encode())
    pieces = pieces_of(decode, ids, sizes)
    assert "".join(pieces) == decode(ids)
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


def tokenizer_of(decoder: decoders.Decoder, tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["▁old", "▁hills", "s", "▁", "▁▁▁", ".", "▁.", "\n", "字"]
SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
WORDPIECES = ["do", "##n", "n", "'", "t", ".", "##ing", "##字"]

TOKENIZERS = {
    "sentencepiece": tokenizer_of(SENTENCEPIECE, WORDS + BYTES),
    "metaspace": tokenizer_of(decoders.Metaspace(), WORDS),
    "byte level": tokenizer_of(decoders.ByteLevel(), BYTE_LEVEL),
    "wordpiece": tokenizer_of(decoders.WordPiece(), WORDPIECES),
    "end of word": tokenizer_of(decoders.BPEDecoder(), ["old</w>", "hill", "s</w>", ".</w>"]),
}


def units_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Draw the tokens of one word, special token or character."""
    ids = tokenizer.get_vocab()
    is_byte_level = BYTE_LEVEL[0] in ids
    words = [] if is_byte_level else [i for token, i in ids.items() if token not in BYTES]
    units = [st.sampled_from([*words, ids["</s>"]]).map(lambda token_id: [token_id])]
    if is_byte_level:
        encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        spelled = st.text(min_size=1, max_size=1).map(lambda c: encode.pre_tokenize_str(c)[0][0])
        units.append(spelled.map(lambda letters: [ids[letter] for letter in letters]))
    elif BYTES[0] in ids:
        units.append(
            st.text(min_size=1, max_size=1).map(lambda c: [ids[BYTES[b]] for b in c.encode()])
        )
    return st.one_of(units)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))
@settings(deadline=None)  # a single example may be slow on a busy machine
@given(drawn=st.data())
def test_an_answer_is_what_it_adds_to_the_text_of_its_prompt(tokenizer, drawn):
    units = drawn.draw(st.lists(units_of(tokenizer), max_size=60))
    ids = [token_id for unit in units for token_id in unit]
    # The prompt may also end inside a character, which the answer then completes.
    num_prompt = drawn.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:num_prompt], ids[num_prompt:]
    whole = tokenizer.decode(ids)
    before = tokenizer.decode(prompt)
    while not whole.startswith(before):
        before = before[:-1]
    expected = whole[len(before) :]
    pieces = pieces_of(tokenizer.decode, answer, drawn.draw(SIZES), prompt)
    assert "".join(pieces) == expected
    assert continuation(tokenizer.decode, prompt, answer) == expected


@pytest.mark.parametrize("num_special", [0, 1, 20, 200])
def test_the_space_before_the_first_word_of_an_answer_is_kept(num_special):
    tokenizer = TOKENIZERS["sentencepiece"]
    old, hills, end = [tokenizer.token_to_id(token) for token in ("▁old", "▁hills", "</s>")]
    prompt = [old] * 3 + [end] * num_special
    assert pieces_of(tokenizer.decode, [hills, old], [1], prompt) == [" hills", " old", ""]
    assert "".join(pieces_of(tokenizer.decode, [hills, *[end] * 100, old], [1])) == "hills old"


def test_a_long_prompt_costs_no_more_than_a_short_one():
    num_decoded = 0

    def decode(window: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(window)
        return decode_bytes(window)

    pieces_of(decode, list(b"word " * 20), [1], list(b"prompt " * 10_000))
    assert num_decoded <= 40 * 100
