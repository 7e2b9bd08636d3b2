"""Continue a text with a checkpoint. `--help` shows the options (configs/sample.yaml)."""

import os
import sys
from dataclasses import fields

import hydra
from omegaconf import DictConfig

from kda_lm.checkpoint import open_checkpoint
from kda_lm.cli import one_line_errors, quiet_libraries, required_path
from kda_lm.config import plain, read_config
from kda_lm.device import arithmetic, resolve_device
from kda_lm.generation import SampleConfig, SamplingConfig, generate
from kda_lm.runs import CONFIGS, from_launch_dir

PROMPT_VARIABLE = "KDA_LM_PROMPT"


def run(options: DictConfig) -> list[str]:
    """Sample as configs/sample.yaml says, print the texts, the first while it is drawn, and return them all."""
    values = plain(options)
    names = {field.name for field in fields(SamplingConfig)}
    sampling = read_config(SamplingConfig, {k: v for k, v in values.items() if k in names}, "sample")
    config = read_config(SampleConfig, {k: v for k, v in values.items() if k not in names}, "sample")
    device = resolve_device(config.accelerator)
    tokenizer_file = None if config.tokenizer is None else from_launch_dir(config.tokenizer)
    checkpoint = open_checkpoint(required_path("ckpt", config.ckpt), device, tokenizer_file)
    tokenizer = checkpoint.text_tokenizer()

    prompt = tokenizer.begin(config.prompt)
    decoders = [tokenizer.stream(prompt) for _ in range(config.num_samples)]
    texts = [config.prompt] * config.num_samples
    show(config.prompt)
    with arithmetic(config.precision, device):
        for tokens in generate(checkpoint.model, prompt, config.num_samples, sampling, stop_id=tokenizer.eot_id):
            for i, token in enumerate(tokens.tolist()):
                if token != tokenizer.eot_id:
                    piece = decoders[i].push(token)
                    texts[i] += piece
                    if i == 0:
                        show(piece)
    for i, decoder in enumerate(decoders):
        rest = decoder.flush()
        texts[i] += rest
        show(f"{rest}\n" if i == 0 else f"\n--- sample {i + 1} ---\n{texts[i]}\n")
    return texts


def show(text: str) -> None:
    print(text, end="", flush=True)


def plain_prompt(arguments: list[str]) -> list[str]:
    """Hand `prompt=…` round Hydra, whose grammar would read the commas, quotes and dollars of a sentence."""
    return [_through_environment(argument) if argument.startswith("prompt=") else argument for argument in arguments]


def _through_environment(argument: str) -> str:
    name, _, text = argument.partition("=")
    os.environ[PROMPT_VARIABLE] = text
    return f"{name}=${{oc.env:{PROMPT_VARIABLE}}}"


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="sample")
def main(options: DictConfig) -> None:
    quiet_libraries()
    with one_line_errors():
        run(options)


if __name__ == "__main__":
    sys.argv[1:] = plain_prompt(sys.argv[1:])
    main()
