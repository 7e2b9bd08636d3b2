"""Train a language model: configuration → data, model, trainer → fit → final evaluation → samples → summary.

`python train.py --help` shows the options; configs/train.yaml and the groups beside it say what each means.
"""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf

import kernels
from data import DataConfig, DataModule
from kda_lm.cli import one_line_errors, print_table, quiet_libraries
from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.generation import SamplingConfig
from kda_lm.model import LM, LMConfig
from kda_lm.runs import create_run_folder, identity, launch_dir, resume_config, write_json
from kda_lm.training.callbacks import Monitor, ProgressLine, Samples, sample_text
from kda_lm.training.checkpoint import AtomicCheckpointIO, SaveCheckpoints, read_checkpoint
from kda_lm.training.config import TrainerConfig
from kda_lm.training.loggers import CSVMetrics, wandb_logger
from kda_lm.training.module import TrainingModule
from kda_lm.training.optim import OptimConfig


def train(config: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run `config` and return its summary; `overrides` are the command line's words, for a resumed run."""
    resume = config.resume
    if resume is not None:
        config, folder = resume_config(config, overrides)
    options = OmegaConf.to_container(config, resolve=True)
    assert isinstance(options, dict)
    trainer_config = read_config(TrainerConfig, options["trainer"], "trainer")
    optim = read_config(OptimConfig, options["optim"], "optim")
    prompts = options["samples"].pop("prompts")
    sampling = read_config(SamplingConfig, options["samples"], "samples")

    lightning.seed_everything(config.seed, verbose=False)
    data = DataModule(
        DataConfig.from_mapping(options["data"]),
        batch_size=trainer_config.batch_size,
        micro_batch_size=trainer_config.micro_batch_size,
        max_steps=trainer_config.max_steps,
        seed=config.seed,
        base_dir=launch_dir(),
    ).prepare()
    model_config = read_config(LMConfig, {**options["model"], "vocab_size": data.vocab_size}, "model")
    model = LM(model_config, options["mixers"])
    metadata = {"tokenizer": data.tokenizer.json, "eot_token": data.tokenizer.eot_token, "data": options["data"]}
    module = TrainingModule(model, optim, trainer_config.max_steps, metadata, data.val_bytes)

    checkpoint = None
    if resume is not None:
        checkpoint = folder / "checkpoints" / "last.ckpt"
        check_resumable(checkpoint, module)
    else:
        folder = create_run_folder(config.run_dir, config.name)
        (folder / "tokenizer.json").write_text(data.tokenizer.json, encoding="utf-8")
    run = identity(folder)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    describe(model, trainer_config, data, folder)

    seq_len = data.config.seq_len
    monitor = Monitor(trainer_config.log_every, trainer_config.batch_size * seq_len, seq_len)
    callbacks: list[Callback] = [
        Samples(data.tokenizer, prompts, sampling, folder / "samples"),
        monitor,
        ProgressLine(monitor),
        SaveCheckpoints(
            folder / "checkpoints", trainer_config.save_every, trainer_config.val_every, trainer_config.max_steps
        ),
    ]
    if trainer_config.ema_decay is not None:
        callbacks.insert(0, EMAWeightAveraging(decay=trainer_config.ema_decay))
    loggers: list[Logger] = [CSVMetrics(folder / "metrics.csv")]
    if config.wandb:
        loggers.append(wandb_logger(config.wandb_project, folder, folder.name, run["id"], options))
    trainer = lightning.Trainer(
        accelerator=trainer_config.device,
        devices=trainer_config.devices,
        precision=trainer_config.numerics,
        max_epochs=1,
        max_steps=trainer_config.max_steps,
        val_check_interval=trainer_config.val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # ours log by themselves
        logger=loggers,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    trainer.validate(module, datamodule=data, verbose=False)
    return summarise(trainer, module, data, prompts, sampling, monitor, folder)


def check_resumable(path: Path, module: TrainingModule) -> None:
    """Raise UserError unless the checkpoint at `path` is one of this very model and tokenizer."""
    saved = read_checkpoint(path)["kda_lm"]
    now = {**module.model.hyperparameters(), **module.metadata}
    for name in ("tokenizer", "model", "mixers"):
        if saved[name] != now[name]:
            raise UserError(
                f"cannot resume from {path}: its {name} differs from the configured one; a resumed run keeps "
                "its model, tokenizer and text"
            )


def describe(model: LM, config: TrainerConfig, data: DataModule, folder: Path) -> None:
    """Print what is about to run."""
    seq_len = data.config.seq_len
    device = torch.device("cuda" if config.device == "gpu" else "cpu")
    rows = {
        "layers": " ".join(model.config.pattern[i % len(model.config.pattern)] for i in range(model.config.num_layers)),
        "parameters": f"{model.num_parameters():,} ({model.num_parameters(embeddings=False):,} outside the embedding)",
        "state a sequence": f"{model.state_bytes(seq_len):,} bytes at {seq_len} tokens",
        "training cost": f"{3 * model.flops_per_token(seq_len) / 1e6:.1f} MFLOP a token",
        "data": f"{len(data.train):,} training and {len(data.val):,} validation tokens, vocabulary {data.vocab_size:,}",
        "run": f"{config.max_steps} steps of {config.batch_size} × {seq_len} tokens",
        "device": f"{config.device}, {config.numerics}, kernels {kernels.resolve_backend('auto', device)}",
        "run folder": str(folder),
    }
    print_table("kda_lm", rows)


def summarise(
    trainer: lightning.Trainer,
    module: TrainingModule,
    data: DataModule,
    prompts: list[str],
    sampling: SamplingConfig,
    monitor: Monitor,
    folder: Path,
) -> dict[str, Any]:
    """Print samples and the final table; write and return the summary."""
    score = module.val_score
    assert score is not None
    if not trainer.is_global_zero:
        return {}
    texts = [sample_text(module, data.tokenizer, prompt, sampling) for prompt in prompts]
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / "final.txt").write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")
    for text in texts:
        print(f"\n--- sample ---\n{text}")
    print()
    tokens = trainer.global_step * monitor.tokens_per_step
    speed = monitor.tokens_per_second
    rows = {
        "steps": f"{trainer.global_step:,}",
        "training tokens": f"{tokens:,}",
        "validation loss": f"{score.loss:.4f} nats a token over {score.targets:,} tokens",
        "validation perplexity": f"{score.perplexity:.2f}",
        "bits per byte": "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}",
        "speed": "unknown" if speed is None else f"{speed:,.0f} tokens/s",
        "run folder": str(folder),
    }
    print_table("result", rows)
    summary = {
        "steps": trainer.global_step,
        "tokens": tokens,
        **score.metrics("val"),
        "val/targets": score.targets,
        "tokens_per_second": speed,
        "parameters": module.model.num_parameters(),
        "flops_per_token": module.model.flops_per_token(data.config.seq_len),
        "state_bytes": module.model.state_bytes(data.config.seq_len),
        "seq_len": data.config.seq_len,
        "revision": identity(folder)["revision"],
        "device": torch.cuda.get_device_name() if module.device.type == "cuda" else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    write_json(folder / "summary.json", summary)
    for logger in trainer.loggers:
        logger.log_hyperparams({"summary": summary})
        logger.finalize("success")
    return summary


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    quiet_libraries()
    with one_line_errors():
        train(config, HydraConfig.get().overrides.task)


if __name__ == "__main__":
    main()
