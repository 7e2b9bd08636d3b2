"""Continuations of prompts: how probable a given one is, and the likeliest one, for many prompts at once.

A prompt begins with the end-of-text token, as every document does. Prompt and continuation are tokenized as one text,
and are the continuation's from the first id on that differs from the prompt's alone: where a token spans both, all of
it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data import Tokenizer
from kda_lm.decoding import Decoder
from kda_lm.model import LM

BATCH_TOKENS = 1 << 14  # of a batch, padding included


@dataclass(frozen=True)
class Continuation:
    """Of one prompt."""

    nats: float  # −log p of all its tokens
    tokens: int
    greedy: bool  # whether each of them is the likeliest after what is before it


Pair = tuple[list[int], list[int]]  # ids of a prompt, and of what continues it


def split_ids(tokenizer: Tokenizer, prompt: str, continuation: str) -> Pair:
    """Never an empty prompt: the end-of-text token is in it."""
    alone, whole = tokenizer.begin(prompt), tokenizer.begin(prompt + continuation)
    same = next((i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), min(len(alone), len(whole)))
    same = max(1, min(same, len(whole) - 1))
    return whole[:same], whole[same:]


@torch.inference_mode()
def score_continuations(model: LM, pairs: Sequence[Pair], batch_tokens: int = BATCH_TOKENS) -> list[Continuation]:
    """In the order of `pairs`, whatever goes into one batch with what.

    Shorter rows are filled up behind their end, where nothing that counts can see it.
    """
    device = model.embedding.weight.device
    found: list[Continuation | None] = [None] * len(pairs)
    for batch in _batches([len(a) + len(b) - 1 for a, b in pairs], batch_tokens):
        longest = max(len(pairs[i][0]) + len(pairs[i][1]) - 1 for i in batch)
        most = max(len(pairs[i][1]) for i in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        at = torch.zeros(len(batch), most, dtype=torch.int64)
        targets = torch.full((len(batch), most), -100)
        for row, i in enumerate(batch):
            prompt, continuation = pairs[i]
            ids = torch.tensor([*prompt, *continuation])
            tokens[row, : len(ids) - 1] = ids[:-1]
            at[row, : len(continuation)] = torch.arange(len(prompt) - 1, len(ids) - 1)
            targets[row, : len(continuation)] = ids[len(prompt) :]
        x, _ = model.hidden_states(tokens.to(device), keep_states=False)
        logits = model.logits(model.outputs_at(x, at.to(device)))
        targets = targets.to(device)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        likeliest = ((logits.argmax(-1) == targets) | (targets == -100)).all(1)
        for i, loss, greedy in zip(batch, nats.double().sum(1).tolist(), likeliest.tolist(), strict=True):
            found[i] = Continuation(loss, len(pairs[i][1]), greedy)
    return [x for x in found if x is not None]


@torch.inference_mode()
def complete(
    model: LM, prompts: Sequence[list[int]], most: int, stop_id: int | None = None, batch_tokens: int = BATCH_TOKENS
) -> list[list[int]]:
    """The likeliest continuation of each prompt, token by token: `most` tokens, or up to, without it, `stop_id`."""
    found: list[list[int]] = [[] for _ in prompts]
    longest = max(map(len, prompts), default=1)
    for batch in _batches([len(prompt) + most for prompt in prompts], batch_tokens):
        decoder = Decoder(model, capacity=longest + most)
        logits = decoder.prefill([prompts[i] for i in batch])
        drawn = []
        stopped = torch.zeros(len(batch), dtype=torch.bool)
        for step in range(most):
            token = logits.argmax(-1)
            drawn.append(token.cpu())
            stopped |= drawn[-1] == stop_id
            if stopped.all() or step == most - 1:
                break
            logits = decoder.step(token)
        for i, ids in zip(batch, torch.stack(drawn, 1).tolist(), strict=True):
            found[i] = ids[: ids.index(stop_id)] if stop_id in ids else ids
    return found


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices, the longest first, as many together as make `batch_tokens` with their padding, but at least one."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + count]
        start += count
