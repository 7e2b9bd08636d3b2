from pathlib import Path

import numpy as np
import pytest
import torch

from data import DataError, TokenFile
from data.corpora import FilesCorpus, Part
from data.packing import (
    IGNORE,
    Batch,
    Shape,
    block_start,
    blocks_per_epoch,
    eval_batch,
    read_block,
    train_step,
    window_count,
)
from data.token_file import token_file
from data.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Seven documents of 100, 101, … 106 bytes: 729 tokens."""
    folder = tmp_path_factory.mktemp("packing")
    rng = np.random.default_rng(0)
    paths = []
    for i in range(7):
        paths.append(folder / f"{i}.txt")
        paths[-1].write_bytes(bytes(rng.integers(97, 123, size=100 + i, dtype=np.uint8)))
    return token_file(Part(FilesCorpus("letters", paths), "train"), byte_tokenizer(), folder)


def rows_of(batches: list[Batch]) -> list[list[int]]:
    """Tokens and last target of every row."""
    return [
        [*tokens, int(targets[-1])]
        for batch in batches
        for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"], strict=True)
    ]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(torch.equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


@pytest.mark.parametrize("seq_len", [1, 10, 100, 363, 364, 700, 728])
def test_an_epoch_has_every_block_once(file: TokenFile, seq_len: int) -> None:
    ring, blocks = len(file) - 1, blocks_per_epoch(file, seq_len)
    for epoch in range(3):
        starts = [block_start(file, seq_len, 5, epoch * blocks + i) for i in range(blocks)]
        targets = {(start + 1 + j) % ring for start in starts for j in range(seq_len)}
        assert len(targets) == blocks * seq_len > ring - seq_len
        for start in starts:
            wrapped = [int(file.tokens[(start + j) % ring]) for j in range(seq_len + 1)]
            assert read_block(file, start, seq_len).tolist() == wrapped


def test_order_and_borders_change_with_epoch_and_seed(file: TokenFile) -> None:
    blocks = blocks_per_epoch(file, 10)
    epochs = [
        [block_start(file, 10, seed, epoch * blocks + i) for i in range(blocks)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert epochs[0] != sorted(epochs[0])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({min(epoch) % 10 for epoch in epochs}) == 3


def test_targets_are_the_next_tokens(file: TokenFile) -> None:
    [batch] = train_step(file, Shape(20, 6), seed=0, step=3, rank=0, isolate=False)
    assert batch.keys() == {"tokens", "targets"}
    assert batch["tokens"].shape == batch["targets"].shape == (6, 20)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_micro_batches_and_ranks_split_the_same_step(file: TokenFile) -> None:
    """D11: whatever the number of ranks and micro-batches, the rows of a step are the same, none twice."""
    whole = rows_of(train_step(file, Shape(20, 12), 1, step=2, rank=0, isolate=False))
    halves = train_step(file, Shape(20, 12, 3), 1, step=2, rank=0, isolate=False)
    assert [len(batch["tokens"]) for batch in halves] == [3] * 4
    assert rows_of(halves) == whole
    for world in (2, 3, 4):
        for rank in range(world):
            mine = train_step(file, Shape(20, 12, 1, world), 1, step=2, rank=rank, isolate=False)
            assert rows_of(mine) == whole[rank::world]


def test_a_step_depends_on_nothing_before_it(file: TokenFile) -> None:
    shape = Shape(10, 7, 7)
    steps = [train_step(file, shape, 3, step, 0, False) for step in range(40)]
    for step in (39, 0, 17):
        assert equal(train_step(file, shape, 3, step, 0, False), steps[step])


def test_the_epoch_after_a_resume_is_full(file: TokenFile) -> None:
    """D2: from 90 % of an epoch on, two more epochs have every block once each."""
    shape, blocks = Shape(10, 4), blocks_per_epoch(file, 10)  # 72 blocks: 18 steps an epoch
    assert blocks % 4 == 0
    start = int(0.9 * blocks / 4)
    rows = [
        row for step in range(start, 3 * blocks // 4) for row in rows_of(train_step(file, shape, 0, step, 0, False))
    ]
    left = blocks - 4 * start
    for epoch in (1, 2):
        own = [read_block(file, block_start(file, 10, 0, epoch * blocks + i), 10).tolist() for i in range(blocks)]
        assert rows[left + (epoch - 1) * blocks :][:blocks] == own
        assert len({tuple(row) for row in own}) == blocks


def test_a_step_may_cross_epochs(file: TokenFile) -> None:
    blocks = blocks_per_epoch(file, 100)  # 7
    rows = rows_of(train_step(file, Shape(100, 20), 0, step=0, rank=0, isolate=False))
    expected = [read_block(file, block_start(file, 100, 0, n), 100).tolist() for n in range(20)]
    assert blocks == 7
    assert rows == expected


def test_boundaries_are_row_starts_and_documents(file: TokenFile) -> None:
    """E4."""
    for batch in train_step(file, Shape(150, 8, 4), 0, step=1, rank=0, isolate=True):
        boundaries = batch["cu_seqlens"]
        assert boundaries.dtype == torch.int32
        flat = batch["tokens"].flatten()
        eots = torch.nonzero(flat == file.manifest.eot_id).flatten().tolist()
        assert boundaries.tolist() == sorted({*eots, 0, 150, 300, 450, 600})
        assert eots
        ends = boundaries[1:-1].long() - 1  # the last token of a document predicts the next one's eot
        inner = [end for end in ends.tolist() if (end + 1) % 150]
        assert (batch["targets"].flatten()[inner] == file.manifest.eot_id).all()


def test_a_document_is_the_same_segment_alone_and_after_another(tmp_path: Path) -> None:
    """E4: isolated, document B has the same tokens whether document A stands before it or not."""
    segments = []
    for texts in (["B has this text"], ["A", "B has this text"]):
        paths = [tmp_path / f"{len(texts)}{i}.txt" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        stream = token_file(Part(FilesCorpus("ab", paths), "val"), byte_tokenizer(), tmp_path)
        batch = eval_batch(stream, 40, 40, [0], isolate=True)
        begin = int(stream.offsets[-2])
        assert begin in batch["cu_seqlens"]
        segments.append((batch["tokens"][0, begin : begin + 16], batch["targets"][0, begin : begin + 16]))
    assert torch.equal(segments[0][0], segments[1][0])
    assert torch.equal(segments[0][1], segments[1][1])


@pytest.mark.parametrize("seq_len", [1, 10, 91, 364, 728, 1000])
def test_every_token_is_an_evaluation_target_once(file: TokenFile, seq_len: int) -> None:
    """G5: whatever the batch size and the number of ranks."""
    count = window_count(file, seq_len)
    whole = eval_batch(file, seq_len, seq_len, range(count), isolate=False)
    targets = whole["targets"].flatten()
    assert targets[targets != IGNORE].tolist() == file.tokens[1:].tolist()
    assert whole["tokens"].flatten()[targets != IGNORE].tolist() == file.tokens[:-1].tolist()
    assert (whole["tokens"].flatten()[targets == IGNORE] == file.manifest.eot_id).all()
    for world in (1, 3):
        for size in (3, 8):
            for rank in range(world):
                mine = range(rank, count, world)
                batches = [
                    eval_batch(file, seq_len, seq_len, mine[i : i + size], False) for i in range(0, len(mine), size)
                ]
                for key in ("tokens", "targets"):
                    rows = [row for batch in batches for row in batch[key].tolist()]
                    assert rows == whole[key].tolist()[rank::world]


@pytest.mark.parametrize(
    ("seq_len", "stride"), [(10, 1), (10, 3), (100, 99), (364, 100), (500, 27), (728, 727), (1000, 64), (1000, 1000)]
)
def test_strided_windows(file: TokenFile, seq_len: int, stride: int) -> None:
    """Every token after the first is a target once, after as many tokens as there are or the window holds."""
    batch = eval_batch(file, seq_len, stride, range(window_count(file, stride)), isolate=False)
    found = []
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        places = [i for i, target in enumerate(targets) if target != IGNORE]
        assert places == list(range(places[0], places[0] + len(places))) and len(places) <= stride
        for place in places:
            at = len(found)  # the target is token at + 1 of the stream
            assert targets[place] == file.tokens[at + 1]
            assert tokens[: place + 1] == file.tokens[at - place : at + 1].tolist()
            assert place >= min(at, seq_len - stride)
            found.append(targets[place])
    assert found == file.tokens[1:].tolist()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(8, 0), "batch_size is 0: it must be at least 1"),
        (Shape(8, 4, 0), "micro_batch_size is 0: it must be at least 1"),
        (Shape(8, 6, 4), "batch_size 6 must be a multiple of ranks × micro_batch_size = 1 × 4"),
        (Shape(8, 6, 2, 2), "batch_size 6 must be a multiple of ranks × micro_batch_size = 2 × 2"),
        (Shape(8, 1, None, 2), "batch_size 1 must be a multiple of ranks × micro_batch_size = 2 × 1"),
    ],
)
def test_bad_shapes(shape: Shape, message: str) -> None:
    with pytest.raises(DataError) as caught:
        shape.check()
    assert str(caught.value) == message


def test_too_few_tokens(file: TokenFile) -> None:
    with pytest.raises(DataError, match=r"^training text has 729 tokens, a block needs seq_len \+ 1 = 730: "):
        blocks_per_epoch(file, 729)
