"""Sampling: how the next token is drawn, and texts from a prompt (kda_lm.decoding does the model's part)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_lm.decoding import Decoder
from kda_lm.device import Accelerator, Precision, resolve_device
from kda_lm.model import LM

GREEDY_TEMPERATURE = 1e-6  # below it float32 logits don't bear the division, and the likeliest token always wins


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn."""

    max_new_tokens: int = 200
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = None  # only the k likeliest; null: all, and more than the vocabulary is all
    top_p: float = 0.95  # only the likeliest that together reach this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it takes at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it takes 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it takes at least 1, or null for all")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it takes 0 to 2^63 − 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it takes more than 0, up to 1")


@dataclass(frozen=True)
class SampleConfig:
    """Options of scripts/sample.py beside SamplingConfig's; see configs/sample.yaml."""

    ckpt: str | None = None
    prompt: str = ""
    num_samples: int = 1
    tokenizer: str | None = None
    accelerator: Accelerator = "auto"
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}; it takes at least 1")
        resolve_device(self.accelerator)


def draw(logits: Tensor, config: SamplingConfig, generator: torch.Generator) -> Tensor:
    """The next token of each row: logits [B, vocab] → [B].

    The temperature comes first, then top-k, then top-p on what is left. Draws on the CPU in float32, so that a seed
    means the same on every device.
    """
    if config.temperature < GREEDY_TEMPERATURE:
        return logits.argmax(dim=-1)
    logits = logits.float().cpu() / config.temperature
    if config.top_k is not None and config.top_k < logits.shape[-1]:
        values, order = logits.topk(config.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, values)
    if config.top_p < 1:
        values, order = logits.sort(dim=-1, descending=True)
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # the likeliest token always stays
        values = values.masked_fill(before >= config.top_p, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, values)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


@torch.inference_mode()
def generate(
    model: LM, prompt: Sequence[int], num_samples: int, config: SamplingConfig, stop_id: int | None = None
) -> Iterator[Tensor]:
    """Yield the next token of all samples, [num_samples] on the CPU, up to `max_new_tokens` times.

    A sample that drew `stop_id` goes on yielding it; generation ends early when all have. The prompt must not be
    empty: an empty text is the end-of-text token, which starts every document.

    Raises ValueError: empty prompt.
    """
    if not prompt:
        raise ValueError("the prompt is empty: start with the end-of-text token, as every document does")
    decoder = Decoder(model, capacity=len(prompt) + config.max_new_tokens)
    generator = torch.Generator().manual_seed(config.seed)
    logits = decoder.prefill([prompt] * num_samples)
    stopped = torch.zeros(num_samples, dtype=torch.bool)
    for remaining in reversed(range(config.max_new_tokens)):
        token = draw(logits, config, generator).cpu()
        if stop_id is not None:
            token = torch.where(stopped, stop_id, token)
            stopped |= token == stop_id
        yield token
        if stopped.all() or not remaining:
            return
        logits = decoder.step(token.to(decoder.device))
