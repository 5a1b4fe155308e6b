"""House rules: the transformers tokenizer is the oracle; random ids are seeded."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from core.errors import RequestError
from core.runtime.tokenizer import TextStream, Tokenizer

BOS, EOS, PLAIN_ADDED = "<s>", "</s>", "<tool>"
TEXTS = [
    "Hello, world! It 's n't  fine .",
    "naïve café, Straße",
    "日本語のテキストと中文",
    "👩‍👩‍👧‍👦 and 👍🏽 and 🇨🇭!",
    "  two leading, trailing  ",
    "a\ufffdb\ufffd",
    "ภาษาไทยไม่มีช่องว่าง\n\nnext",
]


def byte_units() -> list[str]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


UNITS = byte_units()


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, some of whose tokens begin or end within a character."""
    smile = [UNITS[byte] for byte in "x🙂y".encode()]
    merges = [("h", "e"), ("l", "l"), ("Ġ", "a"), ("o", "Ġ"), (smile[0], smile[1]), (smile[3], smile[4])]
    vocab = {unit: i for i, unit in enumerate([*UNITS, *(a + b for a, b in merges)])}
    inner = FastTokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return wrapped(inner)


def sentencepiece(decoder: decoders.Decoder, *, byte_fallback: bool = True) -> PreTrainedTokenizerFast:
    """Pieces that mark spaces as ▁, and single bytes for what the pieces lack."""
    pieces = [
        "<unk>",
        "▁",
        "▁▁",
        "▁a",
        "▁the",
        "th",
        "e",
        "a",
        "l",
        "o",
        "h",
        "n't",
        "▁n",
        "'",
        "s",
        ".",
        "▁.",
        "日",
        "\ufffd",
    ]
    if byte_fallback:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoder
    return wrapped(inner)


def wrapped(inner: FastTokenizer) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    inner.add_tokens([AddedToken(PLAIN_ADDED, special=False)])
    bos = inner.token_to_id(BOS)
    inner.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
ORACLES = {
    "byte-level": byte_level(),
    "llama": sentencepiece(LLAMA_DECODER),
    "gemma": sentencepiece(GEMMA_DECODER),
    "metaspace": sentencepiece(decoders.Metaspace(), byte_fallback=False),
}


@pytest.fixture(params=ORACLES)
def oracle(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return ORACLES[request.param]


def ids_of(oracle: PreTrainedTokenizerFast, text: str) -> list[int]:
    return oracle.encode(text, add_special_tokens=False)


def bytes_of(oracle: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token per byte, whatever they decode to."""
    names = UNITS if oracle is ORACLES["byte-level"] else [f"<0x{byte:02X}>" for byte in range(256)]
    return [oracle.convert_tokens_to_ids(names[byte]) for byte in data]


def pieces_of(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.finish()]


def streamed(oracle: PreTrainedTokenizerFast, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    return "".join(pieces_of(Tokenizer(oracle).text_stream(stop), ids))


def cut(text: str, stops: Sequence[str]) -> str:
    """Reads `text` one character at a time until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_encodes_a_plain_prompt_as_the_oracle_does(oracle: PreTrainedTokenizerFast) -> None:
    ids = Tokenizer(oracle).encode("the hello")
    assert ids == oracle("the hello")["input_ids"]
    assert ids[0] == oracle.bos_token_id


def test_eos_ids_are_the_models_and_the_tokenizers_own() -> None:
    oracle = byte_level()
    assert Tokenizer(oracle, eos_token_ids=[7, 9]).eos_ids == {7, 9, oracle.eos_token_id}
    oracle.eos_token = None
    assert Tokenizer(oracle, eos_token_ids=(7,)).eos_ids == {7}


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_oracles_text(oracle: PreTrainedTokenizerFast, text: str) -> None:
    ids = ids_of(oracle, text)
    assert streamed(oracle, ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("stop", [(), ("the",), ("e a", "ea"), ("l", "hel", "\n\n"), ("\ufffd a", "🙂")])
def test_the_pieces_of_random_tokens_are_the_oracles_text_cut_at_the_stop(
    oracle: PreTrainedTokenizerFast, stop: tuple[str, ...]
) -> None:
    rng = random.Random(0)
    beyond_the_vocabulary = len(oracle) + 5
    pieces = [*range(beyond_the_vocabulary), *ids_of(oracle, "the hello a " * 20), *ids_of(oracle, "日🙂é" * 9)]
    for _ in range(150):
        ids = rng.choices(pieces, k=rng.randrange(70))
        assert streamed(oracle, ids, stop) == cut(oracle.decode(ids, skip_special_tokens=True), stop)


def test_no_piece_has_a_character_that_is_not_final() -> None:
    oracle = ORACLES["byte-level"]
    stream = Tokenizer(oracle).text_stream()
    assert [stream.push(i) for i in bytes_of(oracle, "é🙂日!".encode())] == [
        "", "é", "", "", "", "🙂", "", "", "日", "!"
    ]  # fmt: skip


def test_a_run_of_fallback_bytes_comes_when_it_ends() -> None:
    oracle = ORACLES["llama"]
    whole, broken = bytes_of(oracle, "🙂".encode()), bytes_of(oracle, "é".encode() + b"\xe4")
    a = oracle.convert_tokens_to_ids("▁a")
    stream = Tokenizer(oracle).text_stream()
    assert pieces_of(stream, [*whole, a, *broken, a]) == ["", "", "", "", "🙂 a", "", "", "", "\ufffd" * 3 + " a", ""]


def test_each_text_of_joined_emoji_is_never_torn(oracle: PreTrainedTokenizerFast) -> None:
    if oracle is ORACLES["metaspace"]:
        pytest.skip("its vocabulary has no emoji")
    text = "👩‍👩‍👧‍👦👍🏽🇨🇭"
    pieces = pieces_of(Tokenizer(oracle).text_stream(), ids_of(oracle, text))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).strip() == text


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f\x99", b"\x80\x80", b"\xe4\xb8\xf0"])
def test_bytes_that_stay_incomplete_come_at_the_end_as_the_oracle_has_them(tail: bytes) -> None:
    for name in ("byte-level", "llama"):
        oracle = ORACLES[name]
        ids = [*ids_of(oracle, "a"), *bytes_of(oracle, tail)]
        stream = Tokenizer(oracle).text_stream()
        pushed = "".join(stream.push(i) for i in ids)
        assert not pushed.endswith("\ufffd" * len(tail))
        assert pushed + stream.finish() == oracle.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_skipped_even_within_a_character(oracle: PreTrainedTokenizerFast) -> None:
    if oracle is ORACLES["metaspace"]:
        pytest.skip("its vocabulary has no bytes")
    first, *rest = bytes_of(oracle, "日".encode())
    added = oracle.convert_tokens_to_ids(PLAIN_ADDED)
    ids = [oracle.bos_token_id, first, oracle.eos_token_id, *rest, added, oracle.eos_token_id]
    assert streamed(oracle, ids) == f"日{PLAIN_ADDED}"


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    oracle = ORACLES["byte-level"]
    stream = Tokenizer(oracle).text_stream(["END"])
    assert [stream.push(i) for i in ids_of(oracle, "aEbEND")] == ["a", "", "Eb", "", "", ""]
    assert stream.stop
    assert stream.push(ids_of(oracle, "c")[0]) == stream.finish() == ""


def test_what_might_have_become_a_stop_string_comes_at_the_end() -> None:
    oracle = ORACLES["byte-level"]
    stream = Tokenizer(oracle).text_stream(["END"])
    assert pieces_of(stream, ids_of(oracle, "aEN")) == ["a", "", "", "EN"]
    assert not stream.stop


def test_a_stop_string_that_only_the_end_completes_stops() -> None:
    oracle = ORACLES["llama"]
    stream = Tokenizer(oracle).text_stream(["\n"])
    assert "".join(pieces_of(stream, [*ids_of(oracle, "a"), *bytes_of(oracle, b"\n")])) == "a"
    assert stream.stop


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xaabaab", ["aab"], "x"),
        ("xaaab", ["aab"], "xa"),
        ("xababac", ["abac"], "xab"),
        ("xabc", ["ab", "abc"], "x"),
        ("xabc", ["abc", "bc"], "x"),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabd", ["abc", "bd"], "xa"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("日本🙂語", ["🙂"], "日本"),
        ("nothing", ["END", "🙂"], "nothing"),
    ],
)
def test_the_stop_string_that_is_complete_first_counts(text: str, stops: list[str], expected: str) -> None:
    oracle = byte_level()
    ids = ids_of(oracle, text)
    assert streamed(oracle, ids, stops) == streamed(oracle, ids, stops[::-1]) == expected
    oracle.add_tokens([text])
    assert streamed(oracle, [oracle.convert_tokens_to_ids(text)], stops) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        Tokenizer(ORACLES["byte-level"]).text_stream(["END", ""])
    assert caught.value.param == "stop"


def test_a_tokenizers_wish_to_clean_up_spaces_does_not_tear_the_text(oracle: PreTrainedTokenizerFast) -> None:
    ids = ids_of(oracle, "the 's n't a . the")
    plain = oracle.decode(ids, clean_up_tokenization_spaces=False)
    oracle.clean_up_tokenization_spaces = True
    try:
        assert streamed(oracle, ids) == plain
    finally:
        oracle.clean_up_tokenization_spaces = False


def test_decoding_reads_a_bounded_number_of_tokens(
    oracle: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    decode = oracle.decode

    def counting(ids: list[int], **options: bool) -> str:
        read.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(oracle, "decode", counting)
    stream = Tokenizer(oracle).text_stream(["END"])
    for i in ids_of(oracle, "the hello a") * 100:
        stream.push(i)
    assert 0 < max(read) <= 16


def test_the_bytes_of_every_token_are_those_of_its_text(oracle: PreTrainedTokenizerFast) -> None:
    oracle = copy.deepcopy(oracle)
    oracle.add_tokens([AddedToken("▁▁▁"), AddedToken("日é"), AddedToken("<｜a▁b｜>", special=True)])
    tokenizer, before = Tokenizer(oracle), oracle.convert_tokens_to_ids("l")
    for i in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(i).decode(errors="replace") == oracle.decode([before, i]).removeprefix("l")


def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(oracle: PreTrainedTokenizerFast) -> None:
    tokenizer = Tokenizer(oracle)
    for text in TEXTS if oracle is not ORACLES["metaspace"] else ["a hello's"]:
        assert b"".join(map(tokenizer.token_bytes, ids_of(oracle, text))).lstrip() == text.lstrip().encode()


def test_a_token_may_be_part_of_a_character() -> None:
    for name in ("byte-level", "llama"):
        tokenizer, data = Tokenizer(ORACLES[name]), "é🙂\x00\x7f".encode()
        assert b"".join(map(tokenizer.token_bytes, bytes_of(ORACLES[name], data))) == data
    parts = map(Tokenizer(ORACLES["byte-level"]).token_bytes, ids_of(ORACLES["byte-level"], "x🙂y"))
    assert list(parts) == [b"x\xf0", b"\x9f", b"\x99\x82", b"y"]


def test_added_tokens_stand_for_themselves_and_padding_for_nothing(oracle: PreTrainedTokenizerFast) -> None:
    tokenizer = Tokenizer(oracle)
    for token in (BOS, EOS, PLAIN_ADDED):
        assert tokenizer.token_bytes(oracle.convert_tokens_to_ids(token)) == token.encode()
    beyond = len(oracle) + 5
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.is_padding(beyond)
    specials = {i for i in range(beyond) if tokenizer.is_special(i)}
    assert specials == {oracle.bos_token_id, oracle.eos_token_id}


def test_special_tokens_are_in_the_text_where_they_are_wanted(oracle: PreTrainedTokenizerFast) -> None:
    tokenizer, beyond = Tokenizer(oracle), len(oracle) + 5
    ids = [oracle.bos_token_id, *ids_of(oracle, "the hello"), beyond, oracle.eos_token_id, *ids_of(oracle, "a")]
    told = pieces_of(tokenizer.text_stream(special_tokens=True), ids)
    assert "".join(told) == tokenizer.decode_whole(ids)
    stream = tokenizer.text_stream([EOS], special_tokens=True)
    assert "".join(pieces_of(stream, ids)) == oracle.decode(ids).partition(EOS)[0]
    assert stream.stop
