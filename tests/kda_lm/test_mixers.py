"""One mixer at a time: what each option means, and what a layer costs, by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import error, mixer_options, small_options
from torch import Tensor, nn

from kda_lm.layers import Rotary
from kda_lm.mixers import Gate, Mixer, RecurrentMixer, SoftmaxMixer, build_mixer

EXACT = 1e-10
PLAIN = {"conv_width": 0, "activation": "none", "output_norm": False, "output_gate": "none"}


def mixer(name: str, dim: int = 16, **changes: Any) -> Mixer:
    torch.manual_seed(0)
    return build_mixer(dim, small_options(name, **changes), f"mixers.{name}").double().eval()


def inputs(batch: int = 2, length: int = 20, dim: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, dim, dtype=torch.float64, generator=generator)


def whole(layer: Mixer, x: Tensor) -> Any:
    """y and the state, chunkwise."""
    return layer(x)


@torch.no_grad()
def token_by_token(layer: Mixer, x: Tensor) -> Any:
    """The same, all but the first token by `decode`; x [B, T, dim]."""
    first, state = layer(x[:, :1])
    B, T, _ = x.shape
    cache = layer.new_cache(state, B, T)
    layer.fill_cache(cache, state, torch.arange(B), torch.zeros(B, dtype=torch.int64))
    steps = [layer.decode(x[:, t : t + 1], cache, torch.full((B, 1), t)) for t in range(1, T)]
    return torch.cat([first, *steps], dim=1), cache


def set_weight(layer: nn.Linear, value: Tensor) -> None:
    layer.weight = nn.Parameter(value.to(layer.weight.dtype))


# ------------------------------------------------------------------------------ costs by hand


@pytest.mark.parametrize(
    "name, changes, parameters, flops, state",
    [
        (  # H = 2, K = V = 8, gate rank V = 8
            "kda",
            {},
            {
                "q k v out": 4 * 16 * 16,
                "conv": 48 * 4,
                "decay": 16 * 8 + 8 * 16 + 2 + 16,
                "write": 16 * 2,
                "gate": 16 * 8 + 8 * 16 + 16,
                "norm": 8,
            },
            2 * (4 * 256 + 192 + 256 + 32 + 256) + 2 * (6 * 64 + 64 * 24 + 64 * 64),
            4 * (2 * 8 * 8 + 3 * 48),
        ),
        (  # H = 2, H·K = 12, H·V = 24: K = 6, V = 12
            "gated_delta",
            {},
            {
                "q k": 2 * 16 * 12,
                "v out": 2 * 16 * 24,
                "conv": (12 + 12 + 24) * 4,
                "decay": 16 * 2 + 2 + 2,
                "write": 16 * 2,
                "gate": 16 * 24,
                "norm": 12,
            },
            2 * (384 + 768 + 192 + 32 + 32 + 384) + 2 * (6 * 72 + 64 * 24 + 64 * 64),
            4 * (2 * 6 * 12 + 3 * 48),
        ),
        (
            "delta",
            {},
            {"q k v out": 4 * 256, "conv": 192, "write": 32, "norm": 8},
            2 * (1024 + 192 + 32) + 2 * (6 * 64 + 64 * 24 + 64 * 64),
            4 * (2 * 8 * 8 + 3 * 48),
        ),
        (  # the normaliser is one more value column in the state
            "linear",
            {},
            {"q k v out": 4 * 256},
            2 * 1024 + 2 * (4 * 64 + 64 * 16),
            4 * (2 * 8 * 9),
        ),
        (  # HV = 4 value heads of 8 over H = 2 key heads of 8, rank 3
            "kda",
            {"num_value_heads": 4, "expand_v": 2.0, "gate_rank": 3},
            {
                "q k": 2 * 256,
                "v out": 2 * 16 * 32,
                "conv": (16 + 16 + 32) * 4,
                "decay": 16 * 3 + 3 * 32 + 4 + 32,
                "write": 16 * 4,
                "gate": 16 * 3 + 3 * 32 + 32,
                "norm": 8,
            },
            2 * (512 + 1024 + 256 + 144 + 64 + 144) + 4 * (6 * 64 + 64 * 24 + 64 * 64),
            4 * (4 * 8 * 8 + 3 * 64),
        ),
        (  # keys and values of 100 tokens
            "softmax",
            {},
            {"q k v out": 4 * 256, "norms": 2 * 8},
            2 * 1024 + 2 * 100 * 16,
            4 * (2 * 100 * 16),
        ),
        (  # one key head of 8 for two query heads, and a convolution over q, k, v
            "softmax",
            {"num_kv_heads": 1, "conv_width": 4, "qk_norm": "none"},
            {"q out": 2 * 256, "k v": 2 * 128, "conv": 32 * 4},
            2 * (512 + 256 + 128) + 2 * 100 * 16,
            4 * (2 * 100 * 8 + 3 * 32),
        ),
    ],
    ids=["kda", "gated_delta", "delta", "linear", "kda-grouped", "softmax", "softmax-grouped"],
)
def test_costs_by_hand(name: str, changes: dict[str, Any], parameters: dict[str, int], flops: int, state: int) -> None:
    """Two heads over 16 channels, 100 tokens; a chunk counts as 64 tokens."""
    layer = mixer(name, **changes)
    assert layer.num_parameters() == sum(parameters.values())
    assert layer.flops_per_token(100) == flops
    assert layer.state_bytes(100, torch.float32) == state
    grows = isinstance(layer, SoftmaxMixer)
    assert (layer.flops_per_token(200) > flops) == grows
    assert (layer.state_bytes(200, torch.float32) > state) == grows


# ------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("name", ["kda", "gated_delta", "delta", "linear"])
def test_grouped_value_heads_equal_repeated_key_heads(name: str) -> None:
    """HV = 2·H is the layer with HV key heads in which each pair is the same (B8)."""
    grouped = mixer(name, num_value_heads=4, expand_k=1.0, expand_v=2.0)
    assert isinstance(grouped, RecurrentMixer)
    plain = mixer(name, num_heads=4, expand_k=2.0, expand_v=2.0)
    weights = {key: value.clone() for key, value in grouped.state_dict().items()}

    def repeat(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)

    for key in ("q_proj.weight", "k_proj.weight"):
        weights[key] = repeat(weights[key])
    if "conv.weight" in weights:
        q, k, v = weights["conv.weight"].split([16, 16, 32])
        weights["conv.weight"] = torch.cat([repeat(q), repeat(k), v])
    plain.load_state_dict(weights)
    x = inputs(length=70)
    for form in (whole, token_by_token):
        y, state = form(grouped, x)
        expected, expected_state = form(plain, x)
        assert error(y, expected) < EXACT and y.isfinite().all()
        assert error(state.memory, expected_state.memory) < EXACT
        assert state.memory.shape[1] == 4


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_equal_repeated_keys_and_values(kv_heads: int) -> None:
    grouped = mixer("softmax", num_heads=4, num_kv_heads=kv_heads)
    plain = mixer("softmax", num_heads=4)
    weights = {key: value.clone() for key, value in grouped.state_dict().items()}
    for key in ("k_proj.weight", "v_proj.weight"):
        weights[key] = weights[key].unflatten(0, (kv_heads, -1)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    plain.load_state_dict(weights)
    assert error(grouped(inputs())[0], plain(inputs())[0]) < EXACT


# ------------------------------------------------------------------------------ softmax attention


def test_softmax_mixer_by_hand() -> None:
    """o_t = Σ softmax(D^−½ q·k) v without positions, norms and convolution."""
    layer = mixer("softmax", rope=False, qk_norm="none")
    x = inputs(1, 9)
    q, k, v = (F.linear(x[0], p.weight).unflatten(-1, (2, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    o = torch.zeros(9, 2, 8, dtype=torch.float64)
    for t in range(9):
        for h in range(2):
            weights = (k[: t + 1, h] @ q[t, h] / 8**0.5).softmax(0)
            o[t, h] = weights @ v[: t + 1, h]
    assert error(layer(x)[0][0], F.linear(o.flatten(1), layer.out_proj.weight)) < EXACT


@pytest.mark.parametrize("split", [1, 3, 8])
def test_window(split: int) -> None:
    """A token's output follows from the last four inputs, its own included, whether decoded or not."""
    layer = mixer("softmax", window=4)
    x = inputs(2, 12)
    y, _ = layer(x)
    assert error(y, mixer_of_all(x)) > 1e-3
    for t in (3, 4, 11):
        changed = x.clone()
        changed[:, : t - 3] = 1.0
        assert error(layer(changed)[0][:, t], y[:, t]) < EXACT
    first, state = layer(x[:, :split])
    outputs = [first]
    for t in range(split, 12):
        one, state = layer(x[:, t : t + 1], state)
        outputs.append(one)
    assert error(torch.cat(outputs, dim=1), y) < EXACT


def mixer_of_all(x: Tensor) -> Tensor:
    y: Tensor = mixer("softmax")(x)[0]
    return y


@pytest.mark.parametrize("rope", [True, False])
def test_without_positions_the_past_is_a_set(rope: bool) -> None:
    layer = mixer("softmax", rope=rope)
    x = inputs(1, 12)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = torch.cat([x[:, order], x[:, 11:]], dim=1)
    difference = error(layer(shuffled)[0][:, -1], layer(x)[0][:, -1])
    assert difference > 1e-3 if rope else difference < EXACT


def test_rope_knows_distances_only() -> None:
    """Scores depend on differences of places, and a token's place counts what the cache holds."""
    layer = mixer("softmax", qk_norm="none")
    x, rotate = inputs(1, 10), Rotary(8, 10000.0)
    q, k = (F.linear(x, p.weight).unflatten(-1, (2, 8)) for p in (layer.q_proj, layer.k_proj))

    def scores(offset: int) -> Tensor:
        places = torch.arange(offset, offset + 10)
        return torch.einsum("bthd,bshd->bhts", rotate(q, places), rotate(k, places))

    assert error(scores(50), scores(0)) < 1e-5  # angles are float32
    assert error(scores(0), torch.einsum("bthd,bshd->bhts", q, k)) > 0.1
    _, state = layer(inputs(1, 50, seed=1))
    _, after = layer(x, state)
    assert after.keys.shape[1] == 60
    assert error(after.keys[:, 50:], rotate(k, torch.arange(50, 60))) < 1e-6


@pytest.mark.parametrize("name, on", [("softmax", "rms"), ("kda", "l2"), ("linear", "l2")])
def test_query_and_key_norm_take_away_their_size(name: str, on: str) -> None:
    for choice in (on, "none"):
        changes = {"feature_map": "none", "normalize": False} if name == "linear" else {}
        if name == "kda":  # additive: without the norm the delta rule need not be stable
            changes = {"rule": "additive", "output_norm": False}
        layer = mixer(name, qk_norm=choice, conv_width=0, activation="none", **changes)
        x = inputs()
        before, _ = layer(x)
        with torch.no_grad():
            layer.q_proj.weight *= 7
            layer.k_proj.weight *= 5
        after, _ = layer(x)
        same = error(after, before) < 1e-4  # the norms' epsilon
        assert same == (choice == on), choice


# ------------------------------------------------------------------------------ the recurrence's options


def by_hand(layer: RecurrentMixer, x: Tensor) -> Tensor:
    """The module's equations, token by token and head by head, for H = HV and no convolution; [B, T, dim]."""
    config, (batch, length, _) = layer.config, x.shape
    heads, size_k, size_v = layer.config.num_heads, layer.head_k_dim, layer.head_v_dim
    act = F.silu if config.activation == "silu" else (lambda z: z)
    q, k, v = (act(F.linear(x, p.weight)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    maps = {"none": lambda z: z, "relu": lambda z: z.clamp(min=0), "elu1": lambda z: torch.where(z > 0, z + 1, z.exp())}
    q, k = (maps[config.feature_map](z).view(batch, length, heads, size_k) for z in (q, k))
    v = v.view(batch, length, heads, size_v)
    if config.qk_norm == "l2":
        q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    o = torch.zeros(batch, length, heads, size_v, dtype=x.dtype)
    for b in range(batch):
        for h in range(heads):
            memory, total = x.new_zeros(size_k, size_v), x.new_zeros(size_k)
            for t in range(length):
                if layer.decay is not None:
                    raw = layer.decay(layer.decay.first(x))[b, t, h]
                    scales = layer.decay.timescale
                    bias = scales.dt_bias.double().view(heads, -1)[h]
                    g = -scales.A_log.double()[h].exp() * (1 + (raw + bias).exp()).log()
                    memory = g.exp()[:, None] * memory
                u = v[b, t, h]
                if layer.write is not None:
                    beta = layer.write(layer.write.first(x))[b, t, h].sigmoid() * (2 if config.allow_neg_eigval else 1)
                    u = beta * (u - memory.T @ k[b, t, h])
                memory = memory + torch.outer(k[b, t, h], u)
                total = total + k[b, t, h]
                if config.normalize:
                    o[b, t, h] = memory.T @ q[b, t, h] / (total @ q[b, t, h])
                else:
                    o[b, t, h] = memory.T @ q[b, t, h] * size_k**-0.5
    if layer.output_norm is not None:
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.output_norm.weight
    y = o.flatten(-2)
    if config.output_gate != "none":
        assert layer.output_gate is not None
        gate = layer.output_gate.proj(x)
        y = y * (gate.sigmoid() if config.output_gate_activation == "sigmoid" else gate * gate.sigmoid())
    return F.linear(y, layer.out_proj.weight)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("kda", {}),
        ("kda", {"allow_neg_eigval": True, "gate_rank": 3, "output_gate_activation": "silu"}),
        ("kda", {"rule": "additive", "output_norm": False}),
        ("gated_delta", {}),
        ("gated_delta", {"rule": "additive", "qk_norm": "none"}),
        ("delta", {"activation": "none"}),
        ("delta", {"feature_map": "relu"}),
        ("linear", {}),
        ("linear", {"feature_map": "relu", "qk_norm": "l2", "normalize": False}),
        ("linear", {"feature_map": "none", "normalize": False, "activation": "silu"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_equations(name: str, changes: dict[str, Any]) -> None:
    layer = mixer(name, **{**changes, "conv_width": 0})
    assert isinstance(layer, RecurrentMixer)
    if layer.output_gate is not None and layer.config.output_gate == "low_rank":
        layer.output_gate.proj[1].bias.normal_()  # type: ignore[index, union-attr, operator]
    x = inputs(2, 12)
    expected = by_hand(layer, x)
    for form in (whole, token_by_token):
        assert error(form(layer, x)[0], expected) < 1e-8, form


def test_names_of_the_gates_in_a_checkpoint() -> None:
    """Of the norm and the gate that one kernel computes: each module keeps its own."""
    names = [name for name in mixer("kda").state_dict() if name.startswith("output_")]
    assert names == ["output_norm.weight", *(f"output_gate.proj.{x}" for x in ("0.weight", "1.weight", "1.bias"))]
    names = [name for name in mixer("gated_delta").state_dict() if name.startswith("output_")]
    assert names == ["output_norm.weight", "output_gate.proj.weight"]


@torch.no_grad()
def test_the_convolution_comes_before_activation_feature_map_and_norm() -> None:
    layer = mixer("kda", conv_width=3, activation="silu")
    bare = mixer("kda", conv_width=0, activation="silu")
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "conv.weight"})
    layer.conv.weight.zero_()
    layer.conv.weight[:, -1] = 1  # the current token alone
    assert error(layer(inputs())[0], bare(inputs())[0]) < EXACT
    layer.conv.weight.zero_()
    layer.conv.weight[:, 0] = 1  # two tokens earlier: the first two see nothing
    y, _ = layer(inputs())
    assert (y[:, :2] == 0).all() and (y[:, 2:] != 0).any()


@torch.no_grad()
def test_normalised_linear_attention_averages_values() -> None:
    """With identity value and output matrices, each output channel lies between the values seen so far."""
    layer = mixer("linear")
    set_weight(layer.v_proj, torch.eye(16))
    set_weight(layer.out_proj, torch.eye(16))
    x = inputs(2, 80)
    y, _ = layer(x)
    low, high = x.cummin(dim=1).values, x.cummax(dim=1).values
    assert (y >= low - 1e-9).all() and (y <= high + 1e-9).all()
    assert error(y[:, 0], x[:, 0]) < 1e-8  # one value is its own average
    constant, _ = layer(torch.ones(1, 5, 16, dtype=torch.float64))
    assert error(constant, torch.ones(1, 5, 16)) < 1e-8
    bare = mixer("linear", normalize=False)
    set_weight(bare.v_proj, torch.eye(16))
    set_weight(bare.out_proj, torch.eye(16))
    outside = bare(x)[0]
    assert ((outside > high) | (outside < low)).any()


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_negative_eigenvalues_reflect(negative: bool) -> None:
    """Writing one value at one key over and over: β → 1 keeps reading v; β → 2 reads 2v, 0, 2v, 0 …"""
    layer = mixer("delta", **PLAIN, allow_neg_eigval=negative)
    x = inputs(1, 1).expand(1, 6, 16).contiguous()
    set_weight(layer.write.proj, 1e3 * x[0, :1].expand(2, 16))  # a huge logit: σ = 1
    set_weight(layer.q_proj, layer.k_proj.weight)
    set_weight(layer.v_proj, torch.eye(16))
    set_weight(layer.out_proj, torch.eye(16) * 8**0.5)  # undo the scale
    y, _ = layer(x)
    for t in range(6):
        expected = x[:, t] * (2 * ((t + 1) % 2) if negative else 1)
        assert (y[:, t] - expected).abs().max() < 1e-4, t  # the key norm's epsilon


@torch.no_grad()
def test_equal_channels_make_kda_gated_delta_net() -> None:
    """The same decay in every channel of a head is a scalar decay; none at all is DeltaNet."""
    kda = mixer("kda", output_gate="none")
    gated = mixer("gated_delta", expand_k=1.0, expand_v=1.0, output_gate="none")
    delta = mixer("delta")
    shared = {k: v for k, v in kda.state_dict().items() if not k.startswith("decay")}
    gated.load_state_dict(shared, strict=False)
    delta.load_state_dict(shared)
    x = inputs(2, 70)
    per_head = gated.decay.timescale
    kda.decay.timescale.A_log.copy_(per_head.A_log)
    kda.decay.timescale.dt_bias.copy_(per_head.dt_bias.repeat_interleave(8))
    kda.decay.up_proj.weight.zero_()
    gated.decay.proj.weight.zero_()
    assert error(kda(x)[0], gated(x)[0]) < EXACT
    assert error(kda(x)[0], delta(x)[0]) > 1e-3
    per_head.A_log.fill_(-200.0)  # e^−200: nothing is forgotten
    assert error(gated(x)[0], delta(x)[0]) < EXACT


@pytest.mark.parametrize("name", ["softmax", "linear", "delta", "gated_delta", "kda"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backends_agree(name: str, backend: str) -> None:
    layer, other = mixer(name), mixer(name, backend=backend)
    x = inputs(1, 70)
    assert error(other(x)[0], layer(x)[0]) < EXACT
    assert error(token_by_token(other, x)[0], layer(x)[0]) < EXACT


def test_gates_are_marked() -> None:
    """Decay, write strength and output gate are `Gate`s, which the optimizer tells apart; nothing else is."""
    layer = mixer("kda")
    assert {name for name, module in layer.named_modules() if isinstance(module, Gate)} == {
        "decay",
        "write",
        "output_gate",
    }
    assert not any(isinstance(m, Gate) for m in mixer("softmax").modules())


def test_published_files_are_the_published_layers() -> None:
    """Each named cell of the table of rules and decays, and the default layer's own options."""
    cells = {name: (o["rule"], o["decay"]) for name in ("linear", "delta", "gated_delta", "kda")
             for o in [mixer_options(name)]}  # fmt: skip
    assert cells == {
        "linear": ("additive", "none"),
        "delta": ("delta", "none"),
        "gated_delta": ("delta", "scalar"),
        "kda": ("delta", "channel"),
    }
    assert build_mixer(16, {"mixer": "recurrent"}, "m").config == build_mixer(16, mixer_options("kda"), "m").config
    assert build_mixer(16, {"mixer": "softmax"}, "m").config == build_mixer(16, mixer_options("softmax"), "m").config
