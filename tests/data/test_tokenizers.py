import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import TRICKY
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data import DataError, Tokenizer
from data.corpora import FilesCorpus, Part, cut, sotu_corpus
from data.tokenizers import EOT, byte_tokenizer, cached_bpe, load_tokenizer, train_bpe


@pytest.fixture(scope="module")
def part() -> Part:
    return Part(sotu_corpus(), "train", 0.03)


@pytest.fixture(scope="module")
def bpe(part: Part) -> Tokenizer:
    return train_bpe(part, vocab_size=600, train_bytes=300_000)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: Tokenizer) -> Tokenizer:
    return byte_tokenizer() if request.param == "bytes" else bpe


def foreign(**options: object) -> tokenizers.Tokenizer:
    """A word-piece tokenizer that would add [CLS] … [SEP], pad and truncate."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "hello", "wor", "##ld", "é"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    return tokenizer


def test_bytes_are_ids_in_byte_order() -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode("aé\n").tolist() == list("aé\n".encode())
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    assert tokenizer._is_bytes  # encoded without the library
    plain = tokenizers.Tokenizer.from_str(tokenizer.json)  # what another program reads from the file
    assert plain.encode(TRICKY.replace(EOT, "")).ids == list(TRICKY.replace(EOT, "").encode())


def test_round_trip_is_exact(tokenizer: Tokenizer) -> None:
    for text in (TRICKY, "", " ", "\n\n", EOT * 2):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot_id not in ids
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.decode([tokenizer.eot_id, *tokenizer.encode("a"), tokenizer.eot_id]) == "a"


def test_json_rebuilds_the_tokenizer(tokenizer: Tokenizer) -> None:
    copy = Tokenizer(tokenizer.json, tokenizer.eot_token)
    assert copy.json == tokenizer.json
    assert copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode(TRICKY).tolist() == tokenizer.encode(TRICKY).tolist()


def test_batches_equal_single_texts(tokenizer: Tokenizer) -> None:
    texts = [TRICKY, "a", "", "some words"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist()


def test_pieces_encode_to_the_ids_of_the_whole(bpe: Tokenizer, speeches: list[str]) -> None:
    for text in (*speeches[:3], TRICKY * 5):
        pieces = bpe.encode_batch(list(cut([text], limit=300)))
        assert np.concatenate(pieces).tolist() == bpe.encode(text).tolist()


def test_stream_equals_decode(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(tokenizer.vocab_size, size=500)  # mostly not UTF-8
    for ids in (tokenizer.encode(TRICKY), tokenizer.encode("👩‍🚀"), noise, noise[:0]):
        stream = tokenizer.stream()
        assert "".join(stream.push(int(i)) for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_stream_never_shows_half_a_character(tokenizer: Tokenizer) -> None:
    text = "a👩‍🚀é中b"
    for end in range(len(tokenizer.encode(text)) + 1):
        stream = tokenizer.stream()
        shown = "".join(stream.push(int(i)) for i in tokenizer.encode(text)[:end])
        assert text.startswith(shown)
    unfinished = tokenizer.stream()
    assert "".join(unfinished.push(int(i)) for i in tokenizer.encode("👩")[:-1]) == ""
    assert unfinished.flush() == "\ufffd"


def test_bpe_learns_the_size_asked_for(bpe: Tokenizer) -> None:
    assert (bpe.vocab_size, bpe.eot_id, bpe.eot_token) == (600, 0, EOT)
    assert len(bpe.encode(" the Congress of the United States")) < 15


def test_bpe_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    files = []
    for i in range(20):
        files.append(tmp_path / f"{i:02}.txt")
        files[-1].write_text(f" {chr(ord('a') + i) * 40}" * 20)
    corpus = FilesCorpus("letters", files)
    held_out = chr(ord("a") + int(Part(corpus, "val", 0.05).rows()[0]))
    tokenizer = train_bpe(Part(corpus, "train", 0.05), vocab_size=400, train_bytes=10**9)
    assert len(tokenizer.encode(held_out * 40)) == 40
    assert all(len(tokenizer.encode(chr(ord("a") + i) * 40)) < 20 for i in range(20) if chr(ord("a") + i) != held_out)


def test_training_is_reproducible_and_capped(part: Part, bpe: Tokenizer) -> None:
    assert train_bpe(part, vocab_size=600, train_bytes=300_000).json == bpe.json
    assert train_bpe(part, vocab_size=600, train_bytes=30_000).json != bpe.json


def test_a_small_text_gives_fewer_ids_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """E7."""
    (tmp_path / "a.txt").write_text("a small text, a small text, " * 36)
    part = Part(FilesCorpus("small", [tmp_path / "a.txt"]), "train")
    tokenizer = cached_bpe(part, 8192, 10**6, tmp_path)
    assert 257 < tokenizer.vocab_size < 300
    assert max(tokenizer.encode("a small text")) < tokenizer.vocab_size
    assert f"gives {tokenizer.vocab_size} ids, fewer than data.vocab_size 8192" in caplog.text


def test_trained_tokenizer_is_cached(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reused while nothing changed, trained again after damage, separate for other options."""
    caplog.set_level(logging.INFO)
    first = cached_bpe(part, 300, 50_000, tmp_path)
    assert cached_bpe(part, 300, 50_000, tmp_path).json == first.json
    assert "reusing" in caplog.text
    [path] = (tmp_path / "tokenizers").iterdir()
    path.write_text(path.read_text()[:1000])
    assert cached_bpe(part, 300, 50_000, tmp_path).json == first.json
    assert "training again" in caplog.text
    assert load_tokenizer(path).json == first.json
    cached_bpe(part, 301, 50_000, tmp_path)
    cached_bpe(Part(part.corpus, "train", 0.03, seed=1), 300, 50_000, tmp_path)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 3


def test_foreign_file_adds_nothing(tmp_path: Path) -> None:
    foreign().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eot_token, tokenizer.eot_id, tokenizer.vocab_size) == ("[SEP]", 2, 8)
    assert tokenizer.encode("hello world hello world").tolist() == [4, 5, 6, 4, 5, 6]
    assert 2 not in tokenizer.encode("hello [SEP]")
    assert tokenizer.token_bytes().tolist() == [0, 0, 0, 0, 5, 3, 2, 2]
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (4, 5, 6, 7)] == ["hello", " wor", "ld", " é"]
    assert stream.flush() == ""


def test_foreign_byte_fallback_stream() -> None:
    vocab = {"<unk>": 0, "</s>": 1, "▁a": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = tokenizers.Tokenizer(models.Unigram([(token, -1.0) for token in vocab], 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = Tokenizer(tokenizer.to_str())
    ids = [2, *(3 + byte for byte in "👩".encode()), 2]
    stream = wrapped.stream()
    assert [stream.push(i) for i in ids] == ["a", "", "", "", "👩", " a"]
    assert wrapped.token_bytes()[ids].sum() == len(" a👩 a".encode())


def test_a_stream_goes_on_after_its_context() -> None:
    """A continued text keeps the space before its first word."""
    wrapped = Tokenizer(foreign().to_str())
    stream = wrapped.stream([4, 5, 6])
    assert [stream.push(i) for i in (4, 5, 6)] == [" hello", " wor", "ld"]
    byte_level = byte_tokenizer().stream([104, 105])
    assert byte_level.push(33) == "!"


def test_lossy_tokenizers_are_told_apart() -> None:
    assert byte_tokenizer().keeps(TRICKY)
    assert Tokenizer(foreign().to_str()).keeps("hello world")
    assert not Tokenizer(foreign().to_str()).keeps("hello moon")


def test_end_of_text_token(tmp_path: Path) -> None:
    named = Tokenizer(foreign().to_str(), "[PAD]")
    assert named.eot_id == 3
    with pytest.raises(DataError, match=r"no end-of-text token <eos>: set data.eot_token to a token it has"):
        Tokenizer(foreign().to_str(), "<eos>")
    without = json.loads(foreign().to_str().replace("[SEP]", "[OTHER]"))
    with pytest.raises(DataError, match=r"no end-of-text token <\|endoftext\|> or .* set data.eot_token to"):
        Tokenizer(json.dumps(without))


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"version": "1.0"}', b"\xff\xfe"])
def test_bad_file_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vocab_below_the_bytes_is_refused(part: Part) -> None:
    with pytest.raises(DataError, match=r"data\.vocab_size is 256: a byte-level BPE needs at least 257"):
        train_bpe(part, 256, 1000)
