"""Text while it streams: stop strings across tokens, half characters, and deltas that join to the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minichunk.models import tiny_tokenizer
from minichunk.text import Detokenizer

TINY = tiny_tokenizer()


def sentencepiece():
    """Decodes as Llama 2 does: words begin with ▁, bytes are <0x..>, the first space is dropped."""
    words = ["<s>", "▁the", "▁cat", "s", "▁", "a", "é", "▁é", "END", "▁END"]
    words += [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


SENTENCEPIECE = sentencepiece()


def in_bytes(character):
    """Byte tokens. Whole characters only: this decoder shows a run of bytes with one bad end as all bad, which no
    stream can foresee."""
    return [10 + b for b in character.encode()]


def pieces(text):
    """One token a byte: every character and every stop string is cut everywhere."""
    alphabet = {b: c for c, b in _byte_of().items()}
    return [TINY.convert_tokens_to_ids(alphabet[b]) for b in text.encode()]


def _byte_of():
    """The byte-level alphabet: {character: byte}."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def stream(ids, stop=(), tokenizer=TINY):
    """(deltas, text, stopped): fed until it stops, then flushed."""
    text, deltas = Detokenizer(tokenizer, stop), []
    for id in ids:
        deltas.append(text.push(id))
        if text.stopped:
            break
    deltas.append(text.flush())
    return deltas, text.text, text.stopped


@pytest.mark.parametrize(
    "text", ["hello world", " the cat", "é", "naïve café", "日本語", "👩‍👩‍👧 ok", "a\n\tb ", "�", "\x00"]
)
def test_text_comes_back_byte_by_byte(text):
    deltas, whole, stopped = stream(pieces(text))
    assert "".join(deltas) == whole == text and not stopped


def test_half_a_character_is_held_back_and_then_given_whole():
    text = Detokenizer(TINY)
    assert [text.push(id) for id in pieces("a€b")] == ["a", "", "", "€", "b"]


def test_an_output_that_ends_in_half_a_character_shows_it_as_the_tokenizer_does():
    ids = pieces("a€")[:-1]
    deltas, whole, _ = stream(ids)
    assert deltas[:-1] == ["a", "", ""] and whole == TINY.decode(ids) == "a" + deltas[-1]


any_ids = st.lists(st.integers(0, 511) | st.sampled_from(pieces("é€👩 the\n")), max_size=40)


@settings(max_examples=300, deadline=None)
@given(any_ids)
def test_deltas_join_to_what_the_tokenizer_makes_of_the_whole(ids):
    deltas, whole, _ = stream(ids)
    assert "".join(deltas) == whole == TINY.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9).map(lambda i: [i]) | st.sampled_from("é€👩 \n").map(in_bytes), max_size=12))
def test_the_same_with_a_tokenizer_that_drops_the_first_space(parts):
    ids = [id for part in parts for id in part]
    deltas, whole, _ = stream(ids, tokenizer=SENTENCEPIECE)
    assert "".join(deltas) == whole == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


def first_stop(text, stop):
    """What is left of a text, read character by character, when the first stop string is complete."""
    for end in range(len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


@pytest.mark.parametrize(
    "text, stop, want",
    [
        ("one END two", ("END",), "one "),
        ("END", ("END",), ""),  # the whole output
        ("abc", ("ab", "abc"), ""),
        ("abc", ("abc", "ab"), ""),
        ("xabd", ("abc", "b"), "xa"),  # a shorter one inside the beginning of a longer one
        ("aab", ("ab",), "a"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("EN EN EN", ("END",), "EN EN EN"),  # begun, never complete
        ("cafés", ("é",), "caf"),
        ("10 € or", ("€ or",), "10 "),
        ("a👩b", ("👩",), "a"),
        ("ab", ("b", "ab"), ""),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_stop_strings_across_tokens_and_inside_characters(text, stop, want):
    deltas, whole, stopped = stream(pieces(text), stop)
    assert (whole, "".join(deltas), stopped) == (want, want, first_stop(text, stop)[1])


def test_what_could_become_a_stop_string_is_held_back_and_no_more():
    text = Detokenizer(TINY, ("END", "\n"))
    assert [text.push(id) for id in pieces("xENxEEN")] == ["x", "", "", "ENx", "", "E", ""]
    assert text.flush() == "EN" and not text.stopped


def test_where_the_text_is_cut_does_not_hang_on_where_the_tokens_are():
    """One token brings "abc" whole; by character, "b" is complete before "abc" is."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"abc": 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    whole, cut = stream([0], ("abc", "b"), tokenizer), stream([1, 2, 3], ("abc", "b"), tokenizer)
    assert whole[1] == cut[1] == "a"


@settings(max_examples=400, deadline=None)
@given(st.text("abé€", max_size=12), st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_stop_strings_cut_where_the_first_is_complete_and_deltas_never_show_them(text, stop):
    want, stopped = first_stop(text, stop)
    deltas, whole, did = stream(pieces(text), stop)
    assert (whole, did, "".join(deltas)) == (want, stopped, want)


@settings(max_examples=200, deadline=None)
@given(any_ids, st.lists(st.sampled_from([" ", "e", " the", "é", "t", "�", "in", "\n"]), min_size=1, max_size=3))
def test_the_same_on_any_tokens(ids, stop):
    want, stopped = first_stop(TINY.decode(ids, skip_special_tokens=True), stop)
    deltas, whole, did = stream(ids, stop)
    assert (whole, "".join(deltas), did) == (want, want, stopped)


def test_special_tokens_are_no_text():
    eos = TINY.eos_token_id
    assert stream([*pieces("ab"), eos])[1] == "ab"
    assert stream([eos, *pieces("ab"), eos, *pieces("c")])[1] == "abc"


def test_the_work_per_token_does_not_grow_with_the_text():
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            Counting.longest = max(Counting.longest, len(ids))
            return TINY.decode(ids, **options)

    stream(pieces("some text, " * 50), ("END",), Counting())
    assert Counting.longest < 10
