"""Decoding in place: one answer whatever comes as prompt, step or several tokens, rows apart, room, autocast.

On a GPU, with CUDA graphs: test_decoding_gpu.py.
"""

from typing import Any

import pytest
import torch
from model_checks import decode
from support import KINDS, PUBLISHED, error, small_options, tiny_lm, tokens

from kda_lm.decoding import Decoder
from kda_lm.mixers import RecurrentState

EXACT = 1e-10  # float64: rounding of some hundred operations, amplified by a few layers
FLOAT32 = 1e-5
BF16 = 0.05  # bf16 has 8 bits: 0.4 % a rounding, over 24 layers

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@torch.inference_mode()
def test_equals_the_whole_pass(kind: str) -> None:
    """Any prefix chunkwise, of one token and shorter than the convolution too; the rest token by token (C1, C3, C7)."""
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(2, 12)
    whole, _ = model(ids)
    for prefix in range(1, 12):
        assert error(decode(model, ids, prefix), whole[:, prefix - 1 :]) < EXACT, prefix
    ids = tokens(1, 131)  # beyond one chunk and beyond two
    whole, _ = model(ids)
    for prefix in (62, 128):
        assert error(decode(model, ids, prefix), whole[:, prefix - 1 :]) < EXACT, prefix


@every_kind
@torch.inference_mode()
def test_several_tokens_at_once(kind: str) -> None:
    """In one piece and in many, by launch or in chunks, between steps."""
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(2, 120)
    whole, _ = model(ids)
    decoder = Decoder(model, capacity=120)
    decoder.prefill(ids[:, :3].tolist())
    start = 3
    for length in (1, 2, 16, 17, 1, 70, 10):
        logits = decoder.append(ids[:, start : start + length])
        assert error(logits, whole[:, start : start + length]) < EXACT, (start, length)
        start += length
    assert start == 120 and decoder.lengths == [120, 120]


@every_kind
@torch.inference_mode()
def test_prompts_of_unequal_length(kind: str) -> None:
    """Each row is what it is alone: nothing pads it, in the prompt and from then on (C6)."""
    model = tiny_lm(KINDS[kind], layers=2).double()
    lengths = [5, 1, 70, 2, 64]
    ids = tokens(5, 80)
    wholes = [model(ids[i : i + 1])[0][0] for i in range(5)]
    decoder = Decoder(model, capacity=80)
    logits = decoder.prefill([row[:n].tolist() for row, n in zip(ids, lengths, strict=True)])
    assert decoder.lengths == lengths
    for steps in range(6):
        for i, n in enumerate(lengths):
            assert error(logits[i], wholes[i][n + steps - 1]) < EXACT, (i, steps)
        following = torch.stack([ids[i, n + steps] for i, n in enumerate(lengths)])
        logits = decoder.step(following)
    more = torch.stack([ids[i, n + 6 : n + 9] for i, n in enumerate(lengths)])
    logits = decoder.append(more)
    for i, n in enumerate(lengths):
        assert error(logits[i], wholes[i][n + 6 : n + 9]) < EXACT, i


@every_kind
@torch.inference_mode()
def test_starting_anew_leaves_nothing_behind(kind: str) -> None:
    """Prompts for the same rows take over the same memory; for another number of rows there is new memory."""
    model = tiny_lm(KINDS[kind], layers=2)
    used = Decoder(model, capacity=90)
    used.prefill(tokens(2, 60, seed=1).tolist())
    used.step(torch.tensor([1, 2]))
    for batch in (2, 3):
        for prompts in (tokens(batch, 7).tolist(), [[4], [5, 6, 7], [8, 9]][:batch]):
            fresh = Decoder(model, capacity=90)
            following = torch.arange(batch)
            for decoder in (used, fresh):
                decoder.prefill(prompts)
            assert used.lengths == fresh.lengths == [len(prompt) for prompt in prompts]
            assert torch.equal(used.step(following), fresh.step(following))


@pytest.mark.parametrize("kind", PUBLISHED)
@torch.inference_mode()
def test_24_layers_do_not_drift(kind: str) -> None:
    """Prefill of T − 1 tokens and one step against the whole pass (C3); in bf16: test_model_states.py."""
    ids = tokens(3, 5)
    model = tiny_lm(KINDS[kind], layers=24)
    whole = model(ids)[0][:, -1]
    assert error(decode(model, ids, 4)[:, -1], whole) < FLOAT32


@pytest.mark.parametrize(
    "kind, dtype, bound",
    [("kda", torch.float32, 1e-4), ("kda", torch.bfloat16, BF16), ("gated_delta", torch.float32, 1e-4)],
)
@torch.inference_mode()
def test_long_decoding_stays_with_the_whole_pass(kind: str, dtype: torch.dtype, bound: float) -> None:
    """1,500 steps: the state is float32, finite, and no further from the chunkwise pass at the end (C9)."""
    model = tiny_lm(small_options(kind), dim=16).to(dtype)
    ids = tokens(1, 1500)
    whole, _ = model(ids)
    decoder = Decoder(model, capacity=1)  # no layer's memory grows
    decoder.prefill(ids[:, :1].tolist())
    for t in range(1, 1500):
        logits = decoder.step(ids[:, t])
        if t % 500 == 499:
            assert error(logits, whole[:, t]) < bound, t
    (state,) = decoder.caches
    assert isinstance(state, RecurrentState)
    assert state.memory.dtype == torch.float32
    assert all(x.isfinite().all() for x in state if x is not None)


@every_kind
@torch.inference_mode()
def test_a_batch_equals_its_rows(kind: str) -> None:
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(4, 20)
    whole, stepped = model(ids)[0], decode(model, ids, 7)
    for i in range(4):
        assert error(model(ids[i : i + 1])[0], whole[i : i + 1]) < EXACT
        assert error(decode(model, ids[i : i + 1], 7), stepped[i : i + 1]) < EXACT


@pytest.mark.parametrize("tied", [True, False])
@every_kind
@torch.inference_mode()
def test_under_autocast(kind: str, tied: bool) -> None:
    """Matrices rounded once give what rounding them at every use gives; the model itself is left as it was."""
    model = tiny_lm(KINDS[kind], layers=2, tie_embeddings=tied)
    before = {name: (x, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    ids = tokens(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        whole, _ = model(ids)
        decoder = Decoder(model, capacity=20)
    decoder.prefill(ids[:, :9].tolist())  # the decoder's arithmetic is that of when it was made
    assert error(decoder.append(ids[:, 9:]), whole[:, 9:]) < 0.02
    for name, x in model.state_dict(keep_vars=True).items():
        assert x is before[name][0] and torch.equal(x, before[name][1]), name


@torch.inference_mode()
def test_room_and_bytes() -> None:
    """A layer that grows has room for `capacity` tokens; what is allocated is what `state_bytes` says of them."""
    for name in ("softmax", "kda"):
        model = tiny_lm(small_options(name), layers=2)
        decoder = Decoder(model, capacity=10)
        decoder.prefill([[1] * 8, [2]])
        assert decoder.cache_bytes == 2 * model.state_bytes(10, torch.float32)
        decoder.append(torch.ones(2, 2, dtype=torch.int64))
        assert decoder.lengths == [10, 3]
        if name == "kda":
            decoder.step(torch.tensor([1, 1]))
            continue
        refused = pytest.raises(ValueError, match="a row would have 11 tokens, but the decoder was made for 10")
        with refused:
            decoder.step(torch.tensor([1, 1]))
        with refused:
            decoder.prefill([[1] * 11])
        assert decoder.lengths == [10, 3]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("prompts: got an empty one or none", lambda decoder: decoder.prefill([])),
        ("prompts: got an empty one or none", lambda decoder: decoder.prefill([[1], []])),
        ("prefill comes first", lambda decoder: Decoder(decoder.model, 4).step(torch.tensor([1]))),
        (r"tokens: got shape \[1, 1\], accepted: \[B\] with B = 2", lambda decoder: decoder.step(torch.ones(1, 1))),
        (r"tokens: got shape \[3\], accepted: \[B\] with B = 2", lambda decoder: decoder.step(torch.ones(3))),
        (r"tokens: got shape \[2, 0\], accepted: \[B, T\]", lambda decoder: decoder.append(torch.ones(2, 0))),
        ("capacity is 0; it takes at least 1", lambda decoder: Decoder(decoder.model, 0)),
        ("cuda_graph: got True on cpu", lambda decoder: Decoder(decoder.model, 4, cuda_graph=True)),
    ],
)
def test_refusals(message: str, call: Any) -> None:
    decoder = Decoder(tiny_lm(small_options("kda")), capacity=9)
    decoder.prefill([[1], [2, 3]])
    with pytest.raises(ValueError, match=message):
        call(decoder)
