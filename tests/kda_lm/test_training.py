"""Training: gradients, stops, weight averaging, what is logged and saved when, and what a run leaves behind."""

import csv
import itertools
import json
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import wandb
from omegaconf import OmegaConf
from support import error, small_options, tiny_lm
from torch import Tensor
from torch.utils.data import DataLoader

from kda_lm.checkpoint import open_checkpoint, read_checkpoint
from kda_lm.errors import UserError
from kda_lm.model import LM
from kda_lm.training import loggers
from kda_lm.training.callbacks import Monitor, ProgressLine, peak_flops
from kda_lm.training.checkpoint import AtomicCheckpointIO
from kda_lm.training.config import TrainerConfig
from kda_lm.training.module import AHEAD, TrainingModule
from kda_lm.training.optim import OptimConfig, group_options, lr_factor

Run = Callable[..., tuple[dict[str, Any], Path]]
Resume = Callable[..., dict[str, Any]]
CPU = torch.device("cpu")


def rows(folder: Path) -> dict[int, dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and steps of the checkpoints that runs write from here on."""
    found: list[tuple[str, int]] = []
    original = AtomicCheckpointIO.save_checkpoint

    def save(self: AtomicCheckpointIO, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        found.append((Path(path).name, checkpoint["global_step"]))
        original(self, checkpoint, path, *args, **kwargs)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    return found


# ------------------------------------------------------------------------------ the gradient of a step


class PlainDescent(TrainingModule):
    """Weights move by minus the gradient, so that it can be read off them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        group = {"params": list(self.model.parameters()), **group_options(self.optim, muon=False, decay=False)}
        return torch.optim.SGD([group])


def step_gradient(batch: list[dict[str, Tensor]], grad_clip: float = 0.0) -> tuple[Tensor, dict[str, float]]:
    """The gradient that one training step over `batch` applies, flattened, and what the step reports."""
    model = tiny_lm(small_options("kda"), small_options("softmax")).double().train()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    config = OptimConfig(optimizer="adamw", lr=1.0, schedule="constant", warmup_steps=0, grad_clip=grad_clip)
    module = PlainDescent(model, config, 1, {})
    reported: dict[str, float] = {}

    class Keep(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            reported.update({name: float(value) for name, value in outputs.items()})

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Keep()],
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    return before - torch.cat([p.detach().flatten() for p in model.parameters()]), reported


def masked_batch() -> tuple[Tensor, Tensor]:
    """Six rows whose numbers of targets are as different as can be: 12, 1, 0, 7, 12, 2."""
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(29, (6, 12), generator=generator) for _ in range(2))
    for row, kept in enumerate((12, 1, 0, 7, 12, 2)):
        targets[row, kept:] = -100
    return ids, targets


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [2, 2, 2], [1, 5], [2, 1, 3]], ids=str)
def test_accumulated_gradients_are_the_big_batchs(sizes: list[int]) -> None:
    """Whatever the masks: a micro-batch of few targets, or none, doesn't weigh more or less than they do."""
    ids, targets = masked_batch()
    model = tiny_lm(small_options("kda"), small_options("softmax")).double()
    nll, count = model.loss(ids, targets)
    (nll / count).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    micro = [{"tokens": a, "targets": b} for a, b in zip(ids.split(sizes), targets.split(sizes), strict=True)]
    gradient, reported = step_gradient(micro)
    assert int(count) == 34
    assert error(gradient, expected) < 1e-6  # the factor 1 / targets is float32
    assert reported["train/loss"] == pytest.approx(float(nll.detach()) / 34, rel=1e-6)
    assert reported["train/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-6)


def test_clipping() -> None:
    """The whole gradient is shortened to the limit, never lengthened; the norm that is logged is the unclipped one."""
    ids, targets = masked_batch()
    batch = [{"tokens": ids[:3], "targets": targets[:3]}, {"tokens": ids[3:], "targets": targets[3:]}]
    free, reported = step_gradient(batch)
    norm = float(free.norm())
    short, also_reported = step_gradient(batch, grad_clip=norm / 10)
    assert float(short.norm()) == pytest.approx(norm / 10, rel=1e-4)
    assert error(short * 10, free) < 1e-4
    assert reported["train/grad_norm"] == also_reported["train/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert error(step_gradient(batch, grad_clip=norm * 10)[0], free) < 1e-12


# ------------------------------------------------------------------------------ stops


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_the_run(
    run: Run, resume: Resume, monkeypatch: pytest.MonkeyPatch, what: str, value: float
) -> None:
    """The step is named, the checkpoint is the last good one, and the run can go on from it (D17)."""
    loss, backward = LM.loss, TrainingModule.manual_backward

    def bad_loss(self: LM, *args: Any, **batch: Any) -> tuple[Tensor, Tensor]:
        nll, count = loss(self, *args, **batch)
        steps["loss"] += self.training
        return (nll + value if self.training and steps["loss"] == 6 else nll), count

    def bad_backward(self: TrainingModule, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        steps["gradient norm"] += 1
        if steps["gradient norm"] == 6:
            self.model.norm.weight.grad[3] = value  # type: ignore[index]

    steps = {"loss": 0, "gradient norm": 0}
    with monkeypatch.context() as patch:
        if what == "loss":
            patch.setattr(LM, "loss", bad_loss)
        else:
            patch.setattr(TrainingModule, "manual_backward", bad_backward)
        with pytest.raises(UserError, match=rf"^step 6: the {what} is (nan|inf)[^\n]*$"):
            run("bad", "trainer.save_every=1")
    saved = read_checkpoint(Path("bad/checkpoints/last.ckpt"))
    assert saved["global_step"] == 5
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert sorted(rows(Path("bad"))) == [1, 2, 3, 4, 5]
    assert not list(Path("bad").rglob("*.tmp"))
    assert resume("bad")["steps"] == 8


def test_a_host_that_is_ahead_saves_nothing_unseen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the loss of step 5 is seen where step 6 would be saved, and step 5 is what is named."""
    loss, steps = LM.loss, itertools.count(1)

    def bad_loss(self: LM, *args: Any, **batch: Any) -> tuple[Tensor, Tensor]:
        nll, count = loss(self, *args, **batch)
        return (nll * math.nan if self.training and next(steps) == 5 else nll), count

    monkeypatch.setattr(LM, "loss", bad_loss)
    monkeypatch.setitem(AHEAD, "cpu", 8)
    with pytest.raises(UserError, match=r"^step 5: the loss is nan"):
        run("ahead", "trainer.save_every=3", "trainer.val_every=100")
    assert read_checkpoint(Path("ahead/checkpoints/last.ckpt"))["global_step"] == 3


def test_around_a_cuda_graph(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that records nothing: the same steps; gradients stay where they are, through validations, too,
    and go with the graph when training ends, in an error, too. The graph itself: test_training_gpu.py."""
    plain, _ = run("plain", "trainer.micro_batch_size=2")
    places: list[set[int]] = []
    modules: list[TrainingModule] = []
    add_gradients, release = TrainingModule._add_gradients, TrainingModule.release

    def watched(self: TrainingModule, **inputs: Tensor) -> Tensor:
        nll = add_gradients(self, **inputs)
        places.append({p.grad.data_ptr() for p in self.parameters() if p.grad is not None})
        return nll

    def released(self: TrainingModule) -> None:
        release(self)
        modules.append(self)

    monkeypatch.setattr("kda_lm.training.module.Recorded", lambda function: function)
    monkeypatch.setattr(TrainerConfig, "uses_cuda_graph", lambda *_: True)
    monkeypatch.setattr(TrainingModule, "_add_gradients", watched)
    monkeypatch.setattr(TrainingModule, "release", released)
    replayed, _ = run("replayed", "trainer.micro_batch_size=2")
    assert replayed["val/loss"] == plain["val/loss"]
    assert len(places) == 16 and all(place == places[0] for place in places)
    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("broken")
    assert len(set(modules)) == 2
    for module in modules:
        assert module._recorded is None and all(p.grad is None for p in module.parameters())


# ------------------------------------------------------------------------------ precision and averaging


def test_bf16_mixed_on_a_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are bf16; weights, time scales and log-probabilities stay float32 (A9, B14)."""
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    loss = LM.loss

    def spy(self: LM, *args: Any, **kwargs: Any) -> Any:
        found = loss(self, *args, **kwargs)
        seen.add((self.blocks[0].mlp.up_proj(torch.zeros(1, 16)).dtype, found[0].dtype))
        return found

    plain, _ = run("plain")
    monkeypatch.setattr(LM, "loss", spy)
    summary, folder = run("mixed", "trainer.precision=bf16-mixed")
    assert seen == {(torch.bfloat16, torch.float32)}
    state = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert any(name.endswith("A_log") for name in state)
    assert summary["val/loss"] == pytest.approx(plain["val/loss"], rel=0.02) and summary != plain


def test_compiled_and_checkpointed_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both options reach the model, and change nothing but time and memory."""
    compile_blocks = LM.compile_blocks
    monkeypatch.setattr(LM, "compile_blocks", lambda self: compile_blocks(self, backend="aot_eager"))
    options = ["model.pattern=[linear]", "trainer.max_steps=3"]
    plain, _ = run("plain", *options)
    for name in ("compile", "checkpoint_layers"):
        summary, _ = run(name, *options, f"trainer.{name}=true")
        assert summary["val/loss"] == pytest.approx(plain["val/loss"], rel=1e-5)


def test_averaged_weights_are_evaluated_saved_and_sampled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[dict[str, Tensor]] = []
    original = TrainingModule.training_step

    def training_step(self: TrainingModule, *args: Any) -> dict[str, Any]:
        found = original(self, *args)
        weights.append({name: p.detach().clone() for name, p in self.named_parameters()})
        return found

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    fast = ("optim.lr=0.05", "optim.warmup_steps=0", "optim.schedule=constant")
    greedy = ("samples.temperature=0", "samples.max_new_tokens=20")
    summary, folder = run("ema", "trainer.ema_decay=0.99", *fast, *greedy)
    average = weights[0]
    for current in weights[1:]:
        average = {name: 0.99 * average[name] + 0.01 * current[name] for name in average}
    saved = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert all(torch.allclose(saved["state_dict"][name], average[name], atol=1e-6) for name in average)
    assert all(torch.equal(saved["current_model_state"][name], weights[-1][name]) for name in average)
    plain, _ = run("plain", *fast, *greedy)
    assert abs(summary["val/loss"] - plain["val/loss"]) > 1e-3
    assert float(rows(folder)[8]["val/loss"]) == pytest.approx(summary["val/loss"], rel=1e-6)
    # Both texts are of step 8.
    samples = [(folder / "samples" / name).read_text() for name in ("step_000008.txt", "final.txt")]
    assert samples[0] == samples[1]


# ------------------------------------------------------------------------------ what happens at which step


COLUMNS = {"step", "train/loss", "train/grad_norm", "train/lr", "train/tokens", "train/tokens_per_second",
           "train/mfu", "val/loss", "val/perplexity", "val/bits_per_byte"}  # fmt: skip


@pytest.mark.parametrize("micro", ["null", "1"])
def test_every_count_is_of_optimizer_steps(run: Run, saves: list[tuple[str, int]], micro: str) -> None:
    """Four micro-batches a step change nothing in rows, validations, checkpoints and learning rates (D9, D12)."""
    summary, folder = run(
        "counts", "optim.lr=4e-3", f"trainer.micro_batch_size={micro}", "trainer.max_steps=11", "trainer.log_every=3",
        "trainer.val_every=4", "trainer.save_every=5",
    )  # fmt: skip
    table = rows(folder)
    assert set(next(iter(table.values()))) == COLUMNS
    assert {step for step, row in table.items() if row["train/loss"]} == {3, 6, 9, 11}
    assert {step for step, row in table.items() if row["val/loss"]} == {4, 8, 11}
    assert [step for name, step in saves if name == "last.ckpt"] == [5, 10, 11]
    assert {step for name, step in saves if name == "best.ckpt"} <= {4, 8, 11}
    config = OptimConfig(lr=4e-3, warmup_steps=2)
    for step in (3, 6, 9, 11):
        assert float(table[step]["train/lr"]) == pytest.approx(4e-3 * lr_factor(config, 11, step - 1), rel=1e-6)
        assert int(float(table[step]["train/tokens"])) == step * 4 * 16
    assert sorted(p.name for p in (folder / "samples").glob("step_*")) == [
        "step_000004.txt",
        "step_000008.txt",
        "step_000011.txt",
    ]
    assert summary["steps"] == 11 and summary["tokens"] == 11 * 4 * 16


def test_accumulation_trains_the_same_model(run: Run) -> None:
    whole, _ = run("whole")
    parts, _ = run("parts", "trainer.micro_batch_size=1")
    assert parts["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_shorter_than_its_intervals_still_ends_whole(run: Run, steps: int) -> None:
    """`best.ckpt` is what the scripts' help names; a run that is over has one, and a row with its validation."""
    summary, folder = run("short", f"trainer.max_steps={steps}", "trainer.val_every=100", "trainer.save_every=100")
    assert summary["steps"] == steps
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == steps
    assert (folder / "checkpoints" / "best.ckpt").is_file()
    assert float(rows(folder)[steps]["val/loss"]) == pytest.approx(summary["val/loss"], rel=1e-6)


def test_learning(run: Run) -> None:
    """Sixty steps on a corpus of few words: from the uniform 5.5 nats a byte to less than half."""
    summary, folder = run("learn", "trainer.max_steps=60", "trainer.val_every=20", "optim.lr=0.02")
    losses = [float(row["val/loss"]) for step, row in sorted(rows(folder).items()) if row["val/loss"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 2.75
    assert summary["val/perplexity"] == pytest.approx(math.exp(summary["val/loss"]), rel=1e-6)


# ------------------------------------------------------------------------------ the run folder


def test_the_run_folder(run: Run, corpus: Path) -> None:
    """Everything that kda_lm/runs.py names, in forms that others can read; names without `=`."""
    summary, folder = run("folder")
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml", "run.json", "tokenizer.json", "metrics.csv", "summary.json", "checkpoints", "samples",
    }  # fmt: skip
    assert not [p for p in folder.rglob("*") if "=" in p.name or p.name.endswith(".tmp")]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    about = json.loads((folder / "run.json").read_text())
    assert set(about) == {"id", "started", "revision"} and about["revision"] == summary["revision"]
    config = OmegaConf.load(folder / "config.yaml")
    assert config.data.files == str(corpus) and config.trainer.max_steps == 8  # type: ignore[union-attr]
    assert "${" not in (folder / "config.yaml").read_text()
    json.loads((folder / "tokenizer.json").read_text())
    assert (folder / "samples" / "final.txt").read_text().startswith("the")
    model = open_checkpoint(folder / "checkpoints" / "last.ckpt", CPU).model
    assert summary["parameters"] == model.num_parameters()
    assert summary["forward_flops_per_token"] == model.flops_per_token(16) and summary["seq_len"] == 16
    assert summary["state_bytes"] == model.state_bytes(16)


def test_checkpoints_are_plain_and_enough_by_themselves(run: Run) -> None:
    """They load with weights_only=True, and the folder and the corpus may be gone (D6)."""
    summary, folder = run("plain", "optim=adamw", "trainer.ema_decay=0.5")
    (folder / "tokenizer.json").unlink()
    (folder / "config.yaml").unlink()
    for name in ("last.ckpt", "best.ckpt"):
        contents = torch.load(folder / "checkpoints" / name, weights_only=True)
        assert {"state_dict", "optimizer_states", "global_step", "kda_lm", "rng"} <= set(contents)
    opened = open_checkpoint(folder / "checkpoints" / "last.ckpt", CPU)
    assert opened.step == summary["steps"] and not opened.model.training
    assert opened.tokenizer.decode(opened.tokenizer.encode("Ünïcode")) == "Ünïcode"


def test_a_run_repeats_itself(run: Run) -> None:
    first, a = run("first")
    second, b = run("second")
    other, _ = run("other", "seed=1")
    assert first["val/loss"] == second["val/loss"] != other["val/loss"]
    states = [read_checkpoint(f / "checkpoints" / "last.ckpt")["state_dict"] for f in (a, b)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert (a / "samples" / "final.txt").read_text() == (b / "samples" / "final.txt").read_text()


# ------------------------------------------------------------------------------ saving, whole or not at all


def half_a_save(then: Callable[[], None]) -> Callable[..., None]:
    def save(contents: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        file.write(b"half")
        file.flush()
        then()

    return save


def test_a_kill_while_saving_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    child = os.fork()
    if not child:
        torch.save = half_a_save(lambda: os.kill(os.getpid(), signal.SIGKILL))
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"step": 1}
    AtomicCheckpointIO().save_checkpoint({"step": 3}, path)  # what the kill left does not get in the way
    assert torch.load(path, weights_only=True) == {"step": 3}


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failure_while_saving_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def fail() -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half_a_save(fail))
        with pytest.raises(UserError if isinstance(failure, OSError) else KeyboardInterrupt) as caught:
            AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    if isinstance(failure, OSError):
        assert str(path) in str(caught.value) and "No space left" in str(caught.value)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    """The system refuses to let the file grow, in the middle of torch's own writer."""
    path, limits = tmp_path / "last.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        with pytest.raises(UserError, match=r"^cannot write the checkpoint [^\n]*$"):
            AtomicCheckpointIO().save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "checkpoints" / "last.ckpt")


# ------------------------------------------------------------------------------ wandb, without a network


@pytest.fixture
def silent_server() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes connections and never says a word: its address, and the connections so far."""
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        for connection, _ in connections:
            connection.close()
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # its service keeps the first server address that it was given


def wandb_folders(folder: Path) -> list[str]:
    return [p.name for p in (folder / "wandb").glob("*run-*") if p.is_dir()]


@pytest.mark.usefixtures("no_account")
def test_without_an_account_nobody_is_asked(
    run: Run, resume: Resume, silent_server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline without being told, before and after a resume, under the run's own id (D3, D15)."""
    url, connections = silent_server
    monkeypatch.setenv("WANDB_BASE_URL", url)
    start = time.monotonic()
    _, folder = run("offline", "wandb=true")
    resume("offline", "trainer.max_steps=10")
    assert time.monotonic() - start < 30
    assert not connections
    names = wandb_folders(folder)
    run_id = json.loads((folder / "run.json").read_text())["id"]
    assert names and all(name.startswith("offline-run-") and name.endswith(run_id) for name in names)
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.usefixtures("no_account")
@pytest.mark.parametrize("server", ["nobody there", "silent"])
def test_with_an_account_and_no_server_the_run_goes_on_offline(
    run: Run, silent_server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9" if server == "nobody there" else silent_server[0])
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(loggers, "WANDB_INIT_TIMEOUT", 4)
    start = time.monotonic()
    summary, folder = run("unreachable", "wandb=true")
    assert time.monotonic() - start < 25
    assert summary["steps"] == 8 and (folder / "metrics.csv").is_file()
    assert any(name.startswith("offline-run-") for name in wandb_folders(folder))


@pytest.mark.usefixtures("no_account")
@pytest.mark.parametrize("key", ["short", "with space" * 4])
def test_a_malformed_key_does_not_end_in_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Either the run goes on offline, or one line says what is wrong."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(loggers, "WANDB_INIT_TIMEOUT", 4)
    try:
        summary, _ = run("malformed", "wandb=true")
    except UserError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert summary["steps"] == 8


# ------------------------------------------------------------------------------ progress


def test_progress_in_a_log_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 steps of a tenth of a second: a line in ten seconds, and the last step's (D16)."""
    module = TrainingModule(tiny_lm(small_options("kda")), OptimConfig(), 1000, {})
    monitor = Monitor(10, 64, 16)
    monitor.loss = 1.5
    line = ProgressLine(monitor)
    clock = itertools.count(1000.0, 0.1)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=0, max_steps=1000)
    line.on_train_start(trainer, module)
    for step in range(1, 1001):
        trainer.global_step = step
        line.on_train_batch_end(trainer, module, {}, None, step)
    line.on_train_end(trainer, module)
    printed = capsys.readouterr().out.splitlines()
    assert 10 <= len(printed) <= 13
    assert printed[0].startswith("step 1/1000") and printed[-1].startswith("step 1000/1000")
    assert all("loss 1.500" in text and len(text) < 100 and "\x1b" not in text and "\r" not in text for text in printed)


def test_progress_of_other_ranks_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    module = TrainingModule(tiny_lm(small_options("kda")), OptimConfig(), 1, {})
    line = ProgressLine(Monitor(10, 64, 16))
    trainer: Any = SimpleNamespace(is_global_zero=False, global_step=1, max_steps=1)
    line.on_train_start(trainer, module)
    line.on_train_batch_end(trainer, module, {}, None, 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_peak_of_the_data_sheet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 has an H100's arithmetic, whatever the driver calls it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), bf16=True) == 989.4e12


def test_peak_where_no_data_sheet_says() -> None:
    """A matrix product's, measured: this machine does between a MFLOP/s and a PFLOP/s."""
    assert 1e6 < peak_flops(torch.device("cpu"), bf16=True) < 1e15
