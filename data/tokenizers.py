"""Tokenizers: text to ids and back.

Every kind is a `tokenizers.Tokenizer` and so one tokenizer.json, which checkpoints and exports carry along:

- bytes  256 ids in byte order, then `<|endoftext|>` (id 256);
- bpe    byte-level BPE trained on the training documents; `<|endoftext|>` is id 0;
- file   any tokenizer.json.

Documents are data: text that looks like a special token (`<|endoftext|>`) is encoded as the plain characters,
never as the special id, and no BOS, CLS or SEP is added. A foreign file's added tokens that are not marked
special still match, because the library has no switch for those.
"""

import codecs
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.corpora import Part, digest
from data.errors import DataError

log = logging.getLogger(__name__)

EOT = "<|endoftext|>"
EOT_NAMES = (EOT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # tried in this order when none is named
MIN_BPE_VOCAB = 257  # 256 bytes and the end-of-text token
_VERSION = "1"  # of the training recipe; part of the cache key


def _byte_chars() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, [256]."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


_BYTE_OF = {char: byte for byte, char in enumerate(_byte_chars())}


class Tokenizer:
    """A tokenizer.json with one of its tokens named as the end of text.

    json       the text of a tokenizer.json
    eot_token  the end-of-text token; None: the first of EOT_NAMES that the vocabulary has

    Raises DataError if the JSON cannot be read or the end-of-text token is not in it.
    """

    def __init__(self, json: str, eot_token: str | None = None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"not a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True  # special tokens in documents are text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocab = self._tokenizer.get_vocab()
        names = EOT_NAMES if eot_token is None else (eot_token,)
        present = [name for name in names if name in vocab]
        special = _special(self._tokenizer)
        if not present:
            raise DataError(
                f"the tokenizer has no end-of-text token {' or '.join(names)}: set data.eot_token to a token "
                f"it has{f', such as {special[0]}' if special else ''}"
            )
        self.json: str = self._tokenizer.to_str()
        self.eot_token = present[0]
        self.eot_id: int = vocab[self.eot_token]
        self.vocab_size: int = max(vocab.values()) + 1  # ids are 0 … vocab_size − 1
        self._bytes = self._piece_bytes(vocab)
        self._is_bytes = self.json == _byte_json()  # then encoding needs no library

    def fingerprint(self) -> str:
        """Hex digest of all that decides ids."""
        return digest("tokenizer", self.json, self.eot_token)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of one text, [tokens]; no special tokens are added."""
        return self.encode_batch([text])[0]

    def begin(self, text: str) -> list[int]:
        """Ids of the beginning of a document: the end-of-text token, with which every document starts, and `text`."""
        return [self.eot_id, *self.encode(text).tolist()]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, in parallel."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def stream(self, context: Sequence[int] = ()) -> "StreamDecoder":
        """A decoder for ids that come one at a time, after the ids of `context`, whose text it does not repeat.

        Tokenizers that mark the start of words need the context: alone, a first word has no space before it.
        """
        return StreamDecoder(self._tokenizer, self._bytes if self._byte_level else None, context)

    def keeps(self, text: str) -> bool:
        """Whether ids decode to this very text again: not where unknown characters or case are dropped."""
        return self.decode(self.encode(text)) == text

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, [vocab_size]; 0 for special tokens and unused ids.

        Exact for byte-level tokenizers; for others the length of the token as written, with the usual marks
        for a space and for a continued word taken into account.
        """
        return np.array([len(piece) for piece in self._bytes], dtype=np.int64)

    @property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.json).get("decoder"))

    def _piece_bytes(self, vocab: dict[str, int]) -> list[bytes]:
        """The bytes of every id; empty for special tokens and unused ids."""
        pieces = [b""] * self.vocab_size
        special = set(_special(self._tokenizer)) | {self.eot_token}
        byte_level = self._byte_level
        for token, index in vocab.items():
            if token in special:
                continue
            if byte_level and all(char in _BYTE_OF for char in token):
                pieces[index] = bytes(_BYTE_OF[char] for char in token)
            elif not byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                pieces[index] = bytes.fromhex(token[3:5])
            else:
                pieces[index] = token.removeprefix("##").replace("▁", " ").encode()
        return pieces


class StreamDecoder:
    """Turns ids into text as they come, holding back the bytes of an unfinished character.

    For byte-level tokenizers the pieces and the flush together are exactly `decode` of all ids.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, pieces: list[bytes] | None, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._pieces = tokenizer, pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids = [int(token) for token in context[-8:]]  # what was given out, as context, then what is held back
        self._context = len(self._ids)  # how many of them are context

    def push(self, token: int) -> str:
        """Text that this id completes, possibly none."""
        if self._pieces is not None:
            return self._utf8.decode(self._pieces[token])
        self._ids.append(int(token))
        text = self._held_back()
        if text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        return text

    def flush(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._pieces is not None else self._held_back()

    def _held_back(self) -> str:
        context, text = (
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._ids[: self._context], self._ids)
        )
        return text[len(context) :]


def _special(tokenizer: tokenizers.Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


# -------------------------------------------------------------------------------------------- makers


def byte_tokenizer() -> Tokenizer:
    """One id a byte, and `<|endoftext|>` as 256."""
    return Tokenizer(_byte_json())


@lru_cache(maxsize=1)
def _byte_json() -> str:
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([EOT])
    text: str = tokenizer.to_str()
    return text


def train_bpe(part: Part, vocab_size: int, train_bytes: int) -> Tokenizer:
    """Byte-level BPE learned from about `train_bytes` bytes of whole documents, chosen evenly at random.

    The vocabulary may come out smaller than asked for when the text holds too few pairs: use `.vocab_size`.
    """
    if vocab_size < MIN_BPE_VOCAB:
        raise DataError(f"data.vocab_size is {vocab_size}: a byte-level BPE needs at least {MIN_BPE_VOCAB}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(_byte_chars()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(part, train_bytes), trainer)
    return Tokenizer(tokenizer.to_str())


def load_tokenizer(path: Path, eot_token: str | None = None) -> Tokenizer:
    """A tokenizer.json from disk. Raises DataError if it is missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read tokenizer file {path}: {error}; give a tokenizer.json") from None
    try:
        return Tokenizer(text, eot_token)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def cached_bpe(part: Part, vocab_size: int, train_bytes: int, cache_dir: Path) -> Tokenizer:
    """`train_bpe`, kept under `cache_dir/tokenizers` and reused while nothing that decides it changed."""
    key = digest("bpe", _VERSION, part.fingerprint(), str(vocab_size), str(train_bytes))
    path = cache_dir / "tokenizers" / f"{part.corpus.name}-bpe{vocab_size}-{key[:12]}.json"
    tokenizer: Tokenizer | None = None
    if path.exists():
        try:
            tokenizer = load_tokenizer(path)
            log.info("tokenizer: reusing %s", path)
        except DataError as error:
            log.warning("tokenizer: training again, %s", error)
    if tokenizer is None:
        log.info("tokenizer: training a BPE of %d ids on %s", vocab_size, part.corpus.name)
        tokenizer = train_bpe(part, vocab_size, train_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, tokenizer.json)
    if tokenizer.vocab_size < vocab_size:
        log.warning(
            "tokenizer: the text of %s gives %d ids, fewer than data.vocab_size %d; the model takes %d",
            part.corpus.name, tokenizer.vocab_size, vocab_size, tokenizer.vocab_size,
        )  # fmt: skip
    return tokenizer


def _byte_level(model: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sample(part: Part, limit: int) -> Iterator[str]:
    """Pieces of documents chosen at random (a fixed seed), in order, about `limit` bytes in all."""
    rows = part.rows()
    order = np.random.default_rng(0).permutation(len(rows))
    sizes = part.corpus.sizes()[rows]
    chosen = order[: 1 + int(np.searchsorted(np.cumsum(sizes[order]), limit))]
    left = limit
    for _, piece in part.corpus.pieces(rows[np.sort(chosen)]):
        yield piece
        left -= len(piece.encode())
        if left <= 0:
            return


def _write_atomically(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).replace(path)
