"""Text to batches: from a DataConfig to a tokenizer, token files and loaders."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch.utils.data import Dataset

from data import packing
from data.corpora import Corpus, Part, file_corpus, sotu_corpus
from data.errors import DataError
from data.loading import BaseDataModule
from data.packing import Batch, Shape
from data.token_file import TokenFile, token_file
from data.tokenizers import Tokenizer, byte_tokenizer, cached_bpe, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataConfig:
    """Options of the group `data`."""

    corpus: Literal["sotu", "text"] = "sotu"  # sotu: the addresses of the package sotu | text: local files
    files: str | tuple[str, ...] | None = None  # text: a path, glob, folder (.txt .md .jsonl .json .parquet), or a list
    val_files: str | tuple[str, ...] | None = None  # text: separate validation files; None: split off val_fraction
    text_key: str = "text"  # JSON and Parquet: the key that holds the text
    sample_by: Literal["document", "paragraph", "line"] = "document"  # text: a document is the file | …
    val_fraction: float = 0.03  # of the documents, at least one
    split_seed: int = 0  # which documents validate
    tokenizer: Literal["bytes", "bpe", "file"] = "bpe"  # bytes | bpe: trained on the training documents | file
    vocab_size: int = 2048  # bpe: ids asked for, the end-of-text token included
    tokenizer_train_bytes: int = 50_000_000  # bpe: bytes of text to learn from, at most
    tokenizer_file: str | None = None  # file: path of a tokenizer.json
    eot_token: str | None = None  # file: its end-of-text token; None: <|endoftext|> or another common name
    seq_len: int = 256  # tokens of a row
    isolate_documents: bool = False  # add cu_seqlens, so that documents in a row don't see each other
    val_batch_size: int = 8  # windows of seq_len tokens
    max_val_windows: int | None = None  # validate on the first ones only; None: on all
    val_stride: int | None = None  # targets of a window, the tokens before them being context; None: seq_len
    num_workers: int = 0  # loader processes
    cache_dir: str = "~/.cache/kda_lm"  # tokenizers, token files and Arrow copies

    def __post_init__(self) -> None:
        least_one = (
            "vocab_size",
            "tokenizer_train_bytes",
            "seq_len",
            "val_batch_size",
            "max_val_windows",
            "val_stride",
        )
        for name in least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} is {value}: it must be at least 1")
        for name in ("num_workers", "split_seed"):
            if getattr(self, name) < 0:
                raise DataError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.stride > self.seq_len:
            raise DataError(f"val_stride is {self.val_stride}: it must be at most seq_len = {self.seq_len}")
        if not 0 < self.val_fraction < 1:
            raise DataError(f"val_fraction is {self.val_fraction}: it must lie between 0 and 1")
        if self.corpus == "text" and not self.files:
            raise DataError("files is not set: give a path, a glob, a folder or a list of those")
        if self.corpus != "text" and (self.files or self.val_files):
            raise DataError(f"files and val_files need corpus text, not {self.corpus}")
        if self.tokenizer == "file" and not self.tokenizer_file:
            raise DataError("tokenizer_file is not set: tokenizer file needs the path of a tokenizer.json")

    @property
    def stride(self) -> int:
        """Targets of a validation window."""
        return self.seq_len if self.val_stride is None else self.val_stride


class DataModule(BaseDataModule):
    """Builds or reuses the tokenizer and the token files, and serves them; see BaseDataModule.

    base_dir   where relative paths of the config start (default: the working directory now)
    tokenizer  used instead of the one that the config describes: a checkpoint's, say
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        max_steps: int,
        seed: int,
        base_dir: Path | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(
            config.seq_len,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            max_steps=max_steps,
            seed=seed,
            num_workers=config.num_workers,
        )
        self.config = config
        self._given_tokenizer = tokenizer
        self._base_dir = base_dir or Path.cwd()
        self._cache_dir = self._base_dir / Path(config.cache_dir).expanduser()

    def prepare(self) -> "DataModule":
        for file in (self.val, self.train):  # the small one first, as it may be too small
            packing.blocks_per_epoch(file, self.config.seq_len)
        return self

    def _open(self, files: str | tuple[str, ...]) -> Corpus:
        config = self.config
        return file_corpus(
            files,
            cache_dir=self._cache_dir,
            text_key=config.text_key,
            sample_by=config.sample_by,
            base_dir=self._base_dir,
        )

    @cached_property
    def _parts(self) -> tuple[Part, Part]:
        """Training and validation documents."""
        config = self.config
        corpus = sotu_corpus() if config.files is None else self._open(config.files)
        if config.val_files is not None:
            return Part(corpus, "train"), Part(self._open(config.val_files), "val")
        return (
            Part(corpus, "train", config.val_fraction, config.split_seed),
            Part(corpus, "val", config.val_fraction, config.split_seed),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        config = self.config
        if self._given_tokenizer is not None:
            return self._given_tokenizer
        if config.tokenizer == "bytes":
            return byte_tokenizer()
        if config.tokenizer_file is not None and config.tokenizer == "file":
            return load_tokenizer(self._base_dir / Path(config.tokenizer_file).expanduser(), config.eot_token)
        return cached_bpe(self._parts[0], config.vocab_size, config.tokenizer_train_bytes, self._cache_dir)

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer as it is, which may be fewer than the config asks for."""
        return self.tokenizer.vocab_size

    @cached_property
    def train(self) -> TokenFile:
        """Tokens of the training documents."""
        return token_file(self._parts[0], self.tokenizer, self._cache_dir)

    @cached_property
    def val(self) -> TokenFile:
        """Tokens of the validation documents."""
        return token_file(self._parts[1], self.tokenizer, self._cache_dir)

    @property
    def identity(self) -> list[str]:
        """Keys of the token files."""
        return [self.train.manifest.key, self.val.manifest.key]

    @property
    def contents(self) -> str:
        kinds = f"{self.vocab_size:,} kinds"
        return f"{len(self.train):,} tokens to train on, {len(self.val):,} to validate on, of {kinds}"

    @cached_property
    def val_windows(self) -> int:
        """Windows that validation covers, over all ranks."""
        count = packing.window_count(self.val, self.config.stride)
        return min(count, self.config.max_val_windows or count)

    @cached_property
    def val_bytes(self) -> int | None:
        """UTF-8 bytes of the validation text that the validation windows cover.

        All of it, or, under `max_val_windows`, the bytes of the targets (exact for byte-level tokenizers). None, with
        a warning, where the ids do not decode to the text: a tokenizer that drops what it does not know would
        otherwise be paid for it in bits per byte.
        """
        start = next(piece for _, piece in self._parts[1].corpus.pieces(self._parts[1].rows()[:1]))
        if not self.tokenizer.keeps(start):
            log.warning("the tokenizer does not give the text back as it was: no bits per byte are reported")
            return None
        covered = self.val_windows * self.config.stride + 1
        if covered >= len(self.val):
            return self.val.manifest.text_bytes
        return int(self.tokenizer.token_bytes()[self.val.tokens[1:covered]].sum())

    def train_steps(self, shape: Shape, rank: int) -> "TrainSteps":
        return TrainSteps(self.train, shape, self.seed, rank, self.config.isolate_documents)

    def val_batches(self, rank: int, world: int) -> "EvalBatches":
        """This rank's validation windows (rank, rank + world, …), `val_batch_size` at a time."""
        return EvalBatches(self.val, self.config, range(rank, self.val_windows, world))


class TrainSteps(Dataset[list[Batch]]):
    """Optimizer steps of one rank, by step."""

    def __init__(self, file: TokenFile, shape: Shape, seed: int, rank: int, isolate: bool) -> None:
        self._arguments = (file, shape, seed)
        self._rank, self._isolate = rank, isolate

    def __getitem__(self, step: int) -> list[Batch]:
        return packing.train_step(*self._arguments, step, self._rank, self._isolate)


class EvalBatches(Dataset[Batch]):
    """Evaluation windows in batches of `val_batch_size`, by batch; the last may be smaller."""

    def __init__(self, file: TokenFile, config: DataConfig, windows: range) -> None:
        self._file, self._config, self._windows = file, config, windows

    def __len__(self) -> int:
        return -(-len(self._windows) // self._config.val_batch_size)

    def __getitem__(self, index: int) -> Batch:
        c = self._config
        windows = self._windows[index * c.val_batch_size : (index + 1) * c.val_batch_size]
        return packing.eval_batch(self._file, c.seq_len, c.stride, windows, c.isolate_documents)
