"""Train a language model: configuration → data, model, trainer → fit → final evaluation → samples → summary.

`python train.py --help` shows the options; configs/train.yaml and the groups beside it say what each means.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import lightning
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf

from data import BaseDataModule
from data.tasks import TaskDataModule
from kda_lm.checkpoint import check_resumable
from kda_lm.cli import exit_status, one_line_errors, quiet_libraries
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device, resolve_precision
from kda_lm.errors import UserError
from kda_lm.evaluation.tasks import TaskTally, score_tests
from kda_lm.evaluation.text import Tally
from kda_lm.model import LM, LMConfig
from kda_lm.runs import (
    CONFIGS,
    absolute_paths,
    create_run_folder,
    identity,
    is_first_process,
    locked,
    refuse_existing,
    resume_config,
)
from kda_lm.sources import SourceConfig, open_source, read_source
from kda_lm.training.callbacks import Monitor, ProgressLine, Samples
from kda_lm.training.checkpoint import AtomicCheckpointIO, SaveCheckpoints
from kda_lm.training.config import RunConfig, SamplesConfig, TrainerConfig
from kda_lm.training.loggers import open_loggers
from kda_lm.training.module import TrainingModule
from kda_lm.training.optim import OptimConfig
from kda_lm.training.stop import StopOnSignal
from kda_lm.training.summary import Outcome, describe, summarise


@dataclass(frozen=True)
class Settings:
    """A resolved configuration, checked group by group."""

    options: dict[str, Any]  # as composed: what config.yaml and wandb keep
    run: RunConfig
    trainer: TrainerConfig
    optim: OptimConfig
    samples: SamplesConfig
    data: SourceConfig

    @classmethod
    def read(cls, config: DictConfig) -> "Settings":
        options = plain(config)
        options["data"] = absolute_paths(options["data"])
        groups = ("model", "mixers", "data", "optim", "trainer", "samples")
        return cls(
            options,
            read_config(RunConfig, {name: value for name, value in options.items() if name not in groups}, "train"),
            read_config(TrainerConfig, options["trainer"], "trainer"),
            read_config(OptimConfig, options["optim"], "optim"),
            read_config(SamplesConfig, options["samples"], "samples"),
            read_source(options["data"]),
        )


def train(config: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run `config` and return its summary; `overrides` are the command line's words, for a resumed run."""
    folder = None
    if config.resume is not None:
        config, folder = resume_config(config, overrides)
    settings = Settings.read(config)
    if folder is None:
        refuse_existing(settings.run.run_dir)
    module, data = build(settings)
    checkpoint, resumed_step = None, 0
    if folder is None:
        folder = create_run_folder(settings.run.run_dir, settings.run.name or module.model.config.pattern_name)
    else:
        checkpoint = folder / "checkpoints" / "last.ckpt"
        resumed_step = check_resumable(checkpoint, {**module.model.hyperparameters(), **module.metadata})
        if resumed_step > module.max_steps:
            raise UserError(f"trainer.max_steps is {module.max_steps}; the run has {resumed_step} steps already")
    with locked(folder):
        if is_first_process():
            if data.tokenizer is not None:
                (folder / "tokenizer.json").write_text(data.tokenizer.json, encoding="utf-8")
            OmegaConf.save(settings.options, folder / "config.yaml")
            describe(module.model, settings.trainer, data, folder)
        return fit(settings, module, data, folder, checkpoint, resumed_step)


def build(settings: Settings) -> tuple[TrainingModule, BaseDataModule]:
    """The prepared data, and the model with all that its checkpoints say of it."""
    lightning.seed_everything(settings.run.seed, verbose=False)
    data = open_source(
        settings.data,
        batch_size=settings.trainer.batch_size,
        micro_batch_size=settings.trainer.micro_batch_size,
        max_steps=settings.trainer.max_steps,
        seed=settings.run.seed,
    )
    model_options = {**settings.options["model"], "vocab_size": data.vocab_size}
    model = LM(read_config(LMConfig, model_options, "model"), settings.options["mixers"])
    model.backends(resolve_device(settings.trainer.accelerator))  # refuses what is not to be had there
    model.checkpoint_layers = settings.trainer.checkpoint_layers
    if settings.trainer.compile:
        model.compile_blocks()
    metadata = {
        "tokenizer": data.tokenizer and data.tokenizer.json,
        "eot_token": data.tokenizer and data.tokenizer.eot_token,
        "data": {name: value for name, value in settings.options["data"].items() if name != "cache_dir"},
        "text": data.identity,
        "optimizer": settings.optim.optimizer,
        "batches": {
            "seed": settings.run.seed,
            "batch_size": settings.trainer.batch_size,
            "seq_len": settings.data.seq_len,
            "isolate_documents": settings.data.isolate_documents,
        },
    }
    cuda_graph = settings.trainer.uses_cuda_graph(settings.data.isolate_documents)
    new_tally = partial(TaskTally, data.config.task.slice_names) if isinstance(data, TaskDataModule) else Tally
    max_steps = settings.trainer.max_steps
    return TrainingModule(model, settings.optim, max_steps, metadata, data.val_bytes, cuda_graph, new_tally), data


def fit(
    settings: Settings,
    module: TrainingModule,
    data: BaseDataModule,
    folder: Path,
    checkpoint: Path | None,
    resumed_step: int,
) -> dict[str, Any]:
    """Train in `folder`, from `checkpoint` on if there is one, evaluate, summarise, and sample if there is text."""
    samples = None if data.tokenizer is None else Samples(data.tokenizer, settings.samples, folder / "samples")
    seq_len = settings.data.seq_len
    monitor = Monitor(settings.trainer.log_every, settings.trainer.batch_size * seq_len, seq_len)
    about = identity(folder)
    project = settings.run.wandb_project if settings.run.wandb else None
    with open_loggers(folder, project, about["id"], settings.options, resumed_step) as (loggers, log_summary):
        trainer = build_trainer(settings.trainer, folder, loggers, samples, monitor)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        finally:
            module.release()
        if module.val_score is None:  # there was nothing left to train
            trainer.validate(module, datamodule=data, verbose=False)
        if not trainer.is_global_zero:
            return {}
        device = resolve_device(settings.trainer.accelerator)
        module.to(device)  # Lightning has left it on the CPU
        tests = {}
        if isinstance(data, TaskDataModule):
            with arithmetic(settings.trainer.precision, device):
                tests = score_tests(module.model, data, device)
        tokens = trainer.global_step * monitor.tokens_per_step
        outcome = Outcome(module, device, data, tests, trainer.global_step, tokens, monitor.average, about["revision"])
        summary = summarise(outcome, folder)
        log_summary(summary)
        if samples is not None:
            samples.show(module)
    return summary


def build_trainer(
    config: TrainerConfig, folder: Path, loggers: list[Logger], samples: Samples | None, monitor: Monitor
) -> lightning.Trainer:
    """A Lightning Trainer for one run of one epoch: a batch is an optimizer step, so all its counts are steps."""
    device = resolve_device(config.accelerator)
    stop = StopOnSignal()
    save = SaveCheckpoints(folder / "checkpoints", config.save_every, config.val_every, config.max_steps, stop)
    callbacks: list[Callback] = [] if samples is None else [samples]
    if config.ema_decay is not None:
        # After the samples: they are drawn from the averaged weights, before these leave the model again.
        callbacks.append(EMAWeightAveraging(decay=config.ema_decay))
    callbacks += [monitor, ProgressLine(monitor), stop, save]
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=config.devices,
        precision=resolve_precision(config.precision, device),
        max_epochs=1,
        min_epochs=0,
        max_steps=config.max_steps,
        val_check_interval=min(config.val_every, config.max_steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # of what Lightning logs by itself, which is nothing
        logger=loggers,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def main(config: DictConfig) -> None:
    quiet_libraries()
    hydra_config = HydraConfig.get()
    multirun = hydra_config.mode == RunMode.MULTIRUN
    with one_line_errors(go_on=multirun):
        if multirun and config.trainer.devices != 1:
            raise UserError("-m runs one job after the other on one device: trainer.devices must be 1 with it")
        train(config, hydra_config.overrides.task)


if __name__ == "__main__":
    main()
    sys.exit(exit_status())
