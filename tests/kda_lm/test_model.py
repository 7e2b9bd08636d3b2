"""The language model: one answer whichever way it is computed, documents apart, initialisation, counts, refusals."""

import copy
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import KINDS, PUBLISHED, error, mixer_options, small_options, tiny_lm, tokens
from torch import Tensor
from torch._dynamo.utils import counters

import kernels
from kda_lm.decoding import Decoder
from kda_lm.errors import UserError
from kda_lm.generation import SamplingConfig, generate
from kda_lm.mixers import SoftmaxState
from kda_lm.mixers.gates import DecayParameters
from kda_lm.model import LM, LMConfig

EXACT = 1e-10  # float64: rounding of some hundred operations, amplified by a few layers
FLOAT32 = 1e-5  # case C3
BF16 = 0.05  # bf16 has 8 bits: 0.4 % a rounding, over 24 layers

every_kind = pytest.mark.parametrize("kind", KINDS)


def tensors(state: Any) -> list[Tensor]:
    return [x for layer in state for x in layer if x is not None]


# ------------------------------------------------------------------------------ segments


@every_kind
@torch.inference_mode()
def test_segments_with_a_carried_state_equal_the_whole_pass(kind: str) -> None:
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(2, 140)
    whole, last = model.hidden_states(ids)
    for cuts in ([1], [2, 3], [63], [64, 65], [5, 6, 7, 70, 128], [139]):
        state, parts = None, []
        for start, end in zip([0, *cuts], [*cuts, 140], strict=True):
            part, state = model.hidden_states(ids[:, start:end], state=state)
            parts.append(part)
        assert error(torch.cat(parts, dim=1), whole) < EXACT, cuts
        for a, b in zip(tensors(state), tensors(last), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert error(a, b) < EXACT, cuts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@every_kind
@torch.inference_mode()
def test_a_state_is_left_alone(kind: str, dtype: torch.dtype) -> None:
    """One saved state continues twice; what comes back has its layout and dtypes, whatever the length (C8)."""
    model = tiny_lm(KINDS[kind]).to(dtype)
    _, state = model(tokens(2, 5))
    before = [x.clone() for x in tensors(state)]
    first, after = model(tokens(2, 1), state)
    model(tokens(2, 9, seed=1), state)
    again, _ = model(tokens(2, 1), state)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))
    assert type(after[0]) is type(state[0])
    assert [x.dtype for x in tensors(after)] == [x.dtype for x in tensors(state)]
    assert [x.dim() for x in tensors(after)] == [x.dim() for x in tensors(state)]
    if not isinstance(state[0], SoftmaxState):
        assert [x.shape for x in tensors(after)] == [x.shape for x in tensors(state)]
    assert first.dtype == torch.promote_types(dtype, torch.float32)


@every_kind
@torch.inference_mode()
def test_causality(kind: str) -> None:
    """A token changes what comes at it and after it, nothing before."""
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(1, 80)
    whole, _ = model(ids)
    for t in (0, 1, 40, 64, 79):
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % 29
        other, _ = model(changed)
        assert torch.allclose(other[:, :t], whole[:, :t], rtol=0, atol=1e-12), t
        assert not torch.allclose(other[:, t], whole[:, t]), t
        if t < 79:
            assert not torch.allclose(other[:, t + 1], whole[:, t + 1]), t


def test_causality_of_gradients() -> None:
    model = tiny_lm(*KINDS.values()).double()
    x = torch.randn(1, 70, 16, dtype=torch.float64, requires_grad=True)
    model.embedding.register_forward_hook(lambda module, inputs, output: x)
    hidden, _ = model.hidden_states(tokens(1, 70))
    (gradient,) = torch.autograd.grad(hidden[0, 33].sum(), x)
    assert (gradient[0, 34:] == 0).all()
    assert (gradient[0, :34] != 0).any(dim=-1).all()


@pytest.mark.parametrize("init", ["fan_in", "normal"])
@pytest.mark.parametrize("hidden", [0, 24])
@torch.inference_mode()
def test_the_residual_stream_by_hand(init: str, hidden: int) -> None:
    """x ← x + mixer(norm(x)); x ← x + mlp(norm(x)); the tied head reads norm(x); rows times √dim with fan_in."""
    model = tiny_lm(*KINDS.values(), init=init, mlp_hidden=hidden).double()

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    ids = tokens(2, 9)
    x = model.embedding.weight[ids] * (4 if init == "fan_in" else 1)
    for block in model.blocks:
        x = x + block.mixer(norm(x))[0]  # type: ignore[operator]
        if hidden:
            x = x + block.mlp(norm(x))  # type: ignore[operator]
    assert error(model(ids)[0], norm(x) @ model.embedding.weight.T) < EXACT


@pytest.mark.parametrize("hidden", [0, 24])
@torch.inference_mode()
def test_every_addition_is_one_with_the_norm_after_it(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes and in steps: the first norm alone has nothing to add."""
    model, ids = tiny_lm(*KINDS.values(), mlp_hidden=hidden), tokens(2, 9)
    calls: list[str] = []

    def count(name: str, op: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        calls.extend([name] if x.dim() == 3 else [])  # not those of heads
        return op(x, *rest, **options)

    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(kernels, name, partial(count, name, getattr(kernels, name)))
    decoder = Decoder(model, capacity=9)
    for call in (lambda: decoder.prefill(ids[:, :8].tolist()), lambda: decoder.append(ids[:, 8:])):
        calls.clear()
        call()
        assert calls == ["rms_norm"] + ["add_rms_norm"] * len(model.blocks) * (2 if hidden else 1)


# ------------------------------------------------------------------------------ packed documents


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("kind", [*KINDS, "all"])
@torch.inference_mode()
def test_a_document_does_not_see_the_one_before_it(kind: str) -> None:
    """Document B alone equals B after A, whatever A is, through every layer with its convolution (E4)."""
    model = tiny_lm(*(KINDS.values() if kind == "all" else [KINDS[kind]])).double()
    a, b = tokens(1, 37), tokens(1, 70, seed=1)
    alone, _ = model(b)
    for first in (a, (a + 1) % 29, a[:, :1]):
        both = torch.cat([first, b], dim=1)
        apart, _ = model(both, cu_seqlens=packed([first.shape[1], 70]))
        assert error(apart[:, first.shape[1] :], alone) < EXACT
        assert error(apart[:, : first.shape[1]], model(first)[0]) < EXACT
        assert error(model(both)[0][:, first.shape[1] :], alone) > 1e-3  # the test can fail


@every_kind
@torch.inference_mode()
def test_boundaries_over_a_batch_of_rows(kind: str) -> None:
    """cu_seqlens counts the flattened rows: each document is what it is alone, in shape [B, T]."""
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids = tokens(3, 24)
    lengths = [24, 5, 19, 1, 22, 1]  # a row; two documents; three, one token long at either end
    logits, _ = model(ids, cu_seqlens=packed(lengths))
    assert logits.shape == (3, 24, 29)
    for document, found in zip(ids.flatten().split(lengths), logits.flatten(0, 1).split(lengths), strict=True):
        assert error(found, model(document[None])[0][0]) < EXACT
    rows, _ = model(ids, cu_seqlens=packed([24, 24, 24]))
    assert error(rows, model(ids)[0]) < EXACT


@pytest.mark.parametrize("kind", [name for name, options in KINDS.items() if options["mixer"] == "recurrent"])
@torch.inference_mode()
def test_states_of_packed_documents_are_those_of_the_documents(kind: str) -> None:
    model = tiny_lm(KINDS[kind], layers=2).double()
    ids, lengths = tokens(1, 30), [2, 17, 11]
    _, states = model.hidden_states(ids, cu_seqlens=packed(lengths))
    for i, document in enumerate(ids[0].split(lengths)):
        _, alone = model.hidden_states(document[None])
        for a, b in zip(tensors(states), tensors(alone), strict=True):
            assert a.shape[0] == 3
            assert error(a[i], b[0]) < EXACT


def test_gradients_stay_within_a_document() -> None:
    model = tiny_lm(*KINDS.values()).double()
    ids, targets = tokens(1, 50), tokens(1, 50, seed=2)
    only_b = targets.clone()
    only_b[:, :20] = -100
    model.loss(ids, only_b, packed([20, 30]))[0].backward()
    packed_gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.loss(ids[:, 20:], targets[:, 20:])[0].backward()
    alone = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(packed_gradients, alone, strict=True):
        assert (a - b).norm() <= 1e-9 * (1 + b.norm())


# ------------------------------------------------------------------------------ initialisation


def linear_weights(model: LM) -> dict[str, Tensor]:
    return {n: m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_fan_in_initialisation(kind: str) -> None:
    """Matrices 1/√fan-in, what writes to the stream 1/√(2 · layers) of that, embedding 1/√dim at unit scale."""
    model = tiny_lm(mixer_options(kind), dim=192, layers=2, vocab_size=300, tie_embeddings=False)
    for name, weight in linear_weights(model).items():
        std = weight.shape[1] ** -0.5 / (math.sqrt(4) if name.endswith("out_proj") else 1)
        slack = 5 / math.sqrt(2 * weight.numel())  # five standard errors of a standard deviation
        assert float(weight.detach().std()) == pytest.approx(std, rel=slack), name
        assert abs(float(weight.detach().mean())) < 5 * std / math.sqrt(weight.numel()), name
    assert float(model.embedding.weight.detach().std()) == pytest.approx(192**-0.5, rel=0.02)
    assert sum(name.endswith("out_proj") for name in linear_weights(model)) == 4  # mixer and MLP of two blocks
    for name, parameter in model.named_parameters():
        if name.endswith("conv.weight"):
            assert float(parameter.detach().std()) == pytest.approx(0.5, rel=0.1)
        if "norm" in name:
            assert (parameter == 1).all()
        if name.endswith("bias") and "dt_bias" not in name:
            assert (parameter == 0).all()
    tied = tiny_lm(mixer_options(kind), dim=192, vocab_size=300)
    hidden, _ = tied.hidden_states(torch.arange(300)[None, :64])
    logits, _ = tied(torch.arange(300)[None, :64])
    assert float(hidden.detach().std()) == pytest.approx(1, rel=0.05)
    assert float(logits.detach().std()) == pytest.approx(1, rel=0.25)


def test_normal_initialisation() -> None:
    model = tiny_lm(mixer_options("kda"), dim=192, layers=2, vocab_size=300, init="normal")
    for name, weight in linear_weights(model).items():
        std = 0.02 / (math.sqrt(4) if name.endswith("out_proj") else 1)
        slack = 5 / math.sqrt(2 * weight.numel())
        assert float(weight.detach().std()) == pytest.approx(std, rel=slack), name
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gated_delta", "kda"])
def test_time_scales_have_the_published_ranges_in_any_default_dtype(kind: str, default: torch.dtype) -> None:
    """exp(A_log) ~ U(1, 16) (Gated DeltaNet: U(0, 16)), softplus(dt_bias) ~ log U(0.001, 0.1), many heads (A9)."""
    heads = 4096
    sizes = {"num_heads": 1, "num_value_heads": heads, "expand_k": 0.125, "expand_v": heads / 8, "gate_rank": 1}
    torch.set_default_dtype(default)
    try:
        model = tiny_lm(mixer_options(kind, **sizes, output_gate="none", output_norm=False), dim=8, mlp_hidden=0)
    finally:
        torch.set_default_dtype(torch.float32)
    slowest = 1e-3 if kind == "gated_delta" else 1.0
    for convert in (lambda m: m, lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float()):
        model = convert(model)
        (scales,) = [m for m in model.modules() if isinstance(m, DecayParameters)]
        for parameter in (scales.A_log, scales.dt_bias):
            assert parameter.dtype == torch.float32
            assert parameter.isfinite().all()
            assert parameter.requires_grad
        rate, step = scales.A_log.detach().exp(), F.softplus(scales.dt_bias.detach().double())
        assert rate.numel() == heads and slowest <= rate.min() * 1.001 < slowest + 0.1 and 15.9 < rate.max() <= 16.001
        assert float(rate.mean()) == pytest.approx((slowest + 16) / 2, abs=0.4)
        assert 0.99e-3 <= step.min() < 1.1e-3 and 0.09 < step.max() <= 0.1001
        assert float(step.log().mean()) == pytest.approx(math.log(0.01), abs=0.12)
        assert rate.unique().numel() > 0.99 * heads  # not the few values that bf16 would leave
    assert not any(p.isnan().any() or p.isinf().any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
@torch.inference_mode()
def test_narrow_models_run(kind: str, dtype: torch.dtype) -> None:
    model = tiny_lm(KINDS[kind], layers=2)
    ids = tokens(2, 70)
    wide, _ = model(ids)
    model = model.to(dtype)
    narrow, _ = model(ids)
    assert narrow.dtype == torch.float32 and narrow.isfinite().all()
    assert error(narrow, wide) < 0.1
    decoder = Decoder(model, capacity=70)
    decoder.prefill(ids[:, :60].tolist())
    assert error(decoder.append(ids[:, 60:]), narrow[:, 60:]) < 0.1


def test_the_seed_decides_the_weights() -> None:
    same = [tiny_lm(*KINDS.values(), seed=1).state_dict() for _ in range(2)]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    other = tiny_lm(*KINDS.values(), seed=2).state_dict()
    assert not torch.equal(same[0]["embedding.weight"], other["embedding.weight"])


# ------------------------------------------------------------------------------ counts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("hidden", [0, 10, None])
def test_parameter_count(tied: bool, hidden: int | None) -> None:
    """A softmax model by hand: dim 16, vocabulary 29, two layers; null MLP is 8/3 · 16 = 42.7 → 48."""
    model = tiny_lm(small_options("softmax"), layers=2, tie_embeddings=tied, mlp_hidden=hidden)
    width = 48 if hidden is None else hidden
    mixer = 4 * 16 * 16 + 2 * 8  # q, k, v, out; two head norms
    block = mixer + 16 + (3 * 16 * width + 16 if width else 0)
    outside = 2 * block + 16
    assert model.num_parameters(embeddings=False) == outside
    assert model.num_parameters() == outside + 16 * 29 * (1 if tied else 2)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert (model.head.weight is model.embedding.weight) == tied


def test_flops_of_the_model() -> None:
    model = tiny_lm(small_options("softmax"), small_options("linear"), mlp_hidden=10)
    mixers = sum(mixer.flops_per_token(100) for mixer in model.layers())
    assert model.flops_per_token(100) == mixers + 2 * (2 * 3 * 16 * 10) + 2 * 16 * 29
    assert tiny_lm(small_options("softmax"), layers=2).flops_per_token(50) > model.flops_per_token(50)


def test_cost_of_a_window() -> None:
    """Of 100 tokens the first 19 see fewer than 20; a window of the length is none."""
    plain, wide, narrow = (tiny_lm(small_options("softmax", window=window)).layers()[0] for window in (None, 100, 20))
    assert wide.mixing_flops_per_token(100) == plain.mixing_flops_per_token(100) == 2 * 100 * 16
    assert narrow.mixing_flops_per_token(100) == 4 * 16 * 20 * 0.9
    assert narrow.memory_bytes(100, torch.float32) == wide.memory_bytes(20, torch.float32)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "softmax-window"])  # see `memory_bytes`
@torch.inference_mode()
def test_state_bytes_are_the_bytes_of_the_state(kind: str) -> None:
    """For float32 caches; for narrower ones the convolution and the keys and values shrink, the memory does not."""
    model = tiny_lm(KINDS[kind], layers=3)
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1, 9):
            _, state = model.to(dtype)(tokens(1, length))
            actual = sum(x.numel() * x.element_size() for x in tensors(state))
            assert model.state_bytes(length, dtype) == actual, (dtype, length)
    assert model.state_bytes(5) == model.state_bytes(5, torch.bfloat16)


# ------------------------------------------------------------------------------ compiled, checkpointed


def test_compiled_and_checkpointed_blocks() -> None:
    """The same loss and gradients; a kind is compiled once, whole, for all of its layers; names stay; sampling, whose
    lengths all differ, compiles nothing."""
    torch.compiler.reset()
    counters.clear()
    model = tiny_lm(*(small_options(kind) for kind in ("linear", "softmax")), layers=16)
    names, inputs = list(model.state_dict()), tokens(2, 32)

    def results() -> list[Tensor]:
        loss, _ = model.loss(inputs, inputs)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    plain = results()
    model.compile_blocks(backend="aot_eager")
    for model.checkpoint_layers in (False, True):
        assert all(error(out, ref) < 1e-6 for out, ref in zip(results(), plain, strict=True))
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert list(model.state_dict()) == names and list(copy.deepcopy(model).state_dict()) == names
    assert len(list(generate(model, [1, 2], 2, SamplingConfig(max_new_tokens=3)))) == 3
    assert counters["stats"]["unique_graphs"] == 2


def test_checkpointing_keeps_a_layers_input_alone() -> None:
    model = tiny_lm(small_options("delta"), layers=6)
    kept = []
    for model.checkpoint_layers in (False, True):
        sizes: dict[int, int] = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.loss(tokens(2, 64), tokens(2, 64))
        kept.append(sum(sizes.values()))
    assert kept[1] < 0.5 * kept[0]


# ------------------------------------------------------------------------------ pattern, options, refusals


@pytest.mark.parametrize("layers", [1, 3, 4, 7])
def test_the_pattern_is_tiled_over_depth(layers: int) -> None:
    pattern = ("kda", "kda", "kda", "softmax")
    mixers = {"kda": small_options("kda"), "softmax": small_options("softmax"), "linear": small_options("linear")}
    model = LM(LMConfig(pattern, 29, layers, 16), mixers)
    assert [type(m).__name__ for m in model.layers()] == [
        "SoftmaxMixer" if i % 4 == 3 else "RecurrentMixer" for i in range(layers)
    ]
    again = LM.from_hyperparameters(model.hyperparameters())  # also where the depth ends before the pattern
    assert again.config == model.config


def build(model: dict[str, Any] | None = None, **mixer: Any) -> LM:
    """A model from plain values, as a checkpoint or a configuration gives them."""
    options = {"pattern": ["kda"], "vocab_size": 29, "dim": 16, **(model or {})}
    return LM.from_hyperparameters({"model": options, "mixers": {"kda": small_options("kda", **mixer)}})


@pytest.mark.parametrize(
    "model, mixer, words",
    [
        ({"pattern": ["kda", "mamba"]}, {}, ["model.pattern", "'mamba'", "kda"]),
        ({"pattern": []}, {}, ["model", "pattern is empty", "[kda, kda, kda, softmax]"]),
        ({"pattern": "kda"}, {}, ["model.pattern", "'kda'", "a list of text"]),
        ({"depth": 3}, {}, ["model", "'depth'", "pattern", "num_layers", "tie_embeddings"]),
        ({"init": "xavier"}, {}, ["model.init", "'xavier'", "fan_in, normal"]),
        ({"num_layers": 0}, {}, ["model", "num_layers is 0", "at least 1"]),
        ({"dim": 16.5}, {}, ["model.dim", "16.5", "a whole number"]),
        ({"dim": True}, {}, ["model.dim", "True", "a whole number"]),
        ({"mlp_hidden": -1}, {}, ["model", "mlp_hidden is -1"]),
        ({"tie_embeddings": "yes"}, {}, ["model.tie_embeddings", "'yes'", "true or false"]),
        ({}, {"mixer": "mamba"}, ["mixers.kda.mixer", "'mamba'", "recurrent, softmax"]),
        ({}, {"heads": 3}, ["mixers.kda", "'heads'", "num_heads", "conv_width"]),
        ({}, {"rule": "hebb"}, ["mixers.kda.rule", "'hebb'", "additive, delta"]),
        ({}, {"decay": "row"}, ["mixers.kda.decay", "'row'", "none, scalar, channel"]),
        ({}, {"feature_map": "exp"}, ["mixers.kda.feature_map", "'exp'", "none, relu, elu1"]),
        ({}, {"backend": "cuda"}, ["mixers.kda.backend", "'cuda'", "auto", "torch", "reference"]),
        ({}, {"num_heads": 3}, ["mixers.kda", "num_heads = 3", "16"]),
        ({}, {"num_heads": 0}, ["mixers.kda", "num_heads is 0"]),
        ({}, {"num_value_heads": 3}, ["mixers.kda", "num_value_heads is 3", "multiple of num_heads = 2"]),
        ({}, {"num_value_heads": 0}, ["mixers.kda", "num_value_heads is 0"]),
        ({}, {"expand_k": 0.3}, ["mixers.kda", "expand_k", "num_heads = 2"]),
        ({}, {"expand_v": 0}, ["mixers.kda", "expand_v", "num_value_heads = 2"]),
        ({}, {"expand_v": -1.0}, ["mixers.kda", "expand_v"]),
        ({}, {"conv_width": 9}, ["mixers.kda", "conv_width is 9", "0 (none) to 8"]),
        ({}, {"gate_rank": 0}, ["mixers.kda", "gate_rank is 0"]),
        ({}, {"normalize": True}, ["mixers.kda", "normalize", "additive"]),
        ({}, {"rule": "additive", "allow_neg_eigval": True}, ["mixers.kda", "allow_neg_eigval", "delta"]),
        ({}, {"mixer": "softmax"}, ["mixers.kda", "'rule'", "num_kv_heads"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(model: dict[str, Any], mixer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build(model, **mixer)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(UserError, match=r"^mixers.*'triton'.*auto, torch, reference") as caught:
        build(backend="triton").backends(torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_kv_heads": 3}, ["num_kv_heads is 3", "divisor of num_heads = 4"]),
        ({"num_kv_heads": 0}, ["num_kv_heads is 0"]),
        ({"num_heads": 16}, ["rope", "even"]),
        ({"num_heads": 3}, ["dim = 16", "num_heads = 3"]),
        ({"rope_theta": 0.0}, ["rope_theta is 0.0", "positive"]),
        ({"qk_norm": "l2"}, ["qk_norm", "'l2'", "rms, none"]),
        ({"backend": "cudnn"}, ["backend", "'cudnn'", "auto, triton, torch, reference"]),
        ({"window": 0}, ["window is 0", "positive number, or null"]),
    ],
)
def test_softmax_refusals(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        tiny_lm(mixer_options("softmax", **changes))
    message = str(caught.value)
    assert message.startswith("mixers.m0") and "\n" not in message
    assert all(word in message for word in words), message


def test_a_kind_is_looked_up_even_where_the_depth_does_not_reach() -> None:
    with pytest.raises(UserError, match="unknown layer kind 'typo'"):
        build({"pattern": ["kda", "typo"], "num_layers": 1})


def test_hyperparameters_round_trip() -> None:
    model = tiny_lm(*KINDS.values(), tie_embeddings=False, mlp_hidden=20, init="normal").double()
    saved = model.hyperparameters()
    again = LM.from_hyperparameters(json.loads(json.dumps(saved))).double().eval()
    assert again.hyperparameters() == saved and again.config == model.config
    again.load_state_dict(model.state_dict())
    ids = tokens(2, 11)
    assert torch.equal(again(ids)[0], model(ids)[0])


# ------------------------------------------------------------------------------ loss


def test_loss_is_a_sum_and_a_count_over_what_is_not_masked() -> None:
    model = tiny_lm(*KINDS.values()).double()
    ids, targets = tokens(4, 12), tokens(4, 12, seed=1)
    targets[torch.rand(4, 12, generator=torch.Generator().manual_seed(2)) < 0.4] = -100
    nll, count = model.loss(ids, targets)
    log_p = model(ids)[0].detach().log_softmax(-1)
    by_hand = -sum(log_p[i, t, targets[i, t]] for i in range(4) for t in range(12) if targets[i, t] != -100)
    assert count == (targets != -100).sum() and float(nll.detach()) == pytest.approx(float(by_hand), rel=1e-12)
    parts = [model.loss(a, b) for a, b in zip(ids.split([1, 3]), targets.split([1, 3]), strict=True)]
    assert float(sum(n.detach() for n, _ in parts)) == pytest.approx(float(nll.detach()), rel=1e-12)  # type: ignore[arg-type]
    assert sum(int(c) for _, c in parts) == int(count)


def test_loss_is_that_of_the_logits_with_the_z_loss_beside_it() -> None:
    model = tiny_lm(*KINDS.values())
    ids, targets = tokens(2, 12), tokens(2, 12, seed=1)
    targets[0, :5] = -100
    logits = model(ids)[0].detach()
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(model.loss(ids, targets)[0].detach()) == pytest.approx(float(plain), rel=1e-6)
    squares = logits.logsumexp(-1)[targets != -100].square().sum()
    both = model.loss(ids, targets, z_loss=0.1)[0].detach()
    assert float(both) == pytest.approx(float(plain + 0.1 * squares), rel=1e-6)


def test_everything_masked_is_zero_over_zero_targets() -> None:
    model = tiny_lm(small_options("kda"))
    nll, count = model.loss(tokens(1, 6), torch.full((1, 6), -100))
    nll.backward()
    assert float(nll.detach()) == 0 and int(count) == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_kind
def test_logits_with_and_without_targets_agree(kind: str) -> None:
    """The loss is that of the very logits that the model gives without targets (G6)."""
    model = tiny_lm(KINDS[kind]).double()
    ids, targets = tokens(2, 9), tokens(2, 9, seed=1)
    logits, _ = model(ids)
    assert logits.shape == (2, 9, 29)
    nll, count = model.loss(ids, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(nll.detach()) == pytest.approx(float(expected.detach()), rel=1e-12) and int(count) == 18


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied: bool) -> None:
    model = tiny_lm(*KINDS.values(), tie_embeddings=tied).double()
    model.loss(tokens(2, 40), tokens(2, 40, seed=1))[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
