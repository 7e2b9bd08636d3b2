"""What the public functions refuse: the message names the argument, what it got and what is accepted."""

import inspect
import re
from typing import Any

import pytest
import torch

import kernels
from kernels import BACKENDS, chunk, chunk_kda, fused_recurrent, resolve_backend, short_convolution, softmax_attention
from kernels.checks import read_cu_seqlens

B, T, H, HV, K, V = 1, 6, 2, 4, 8, 5


def kda_arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(B, T, H, K),
        "k": torch.zeros(B, T, H, K),
        "v": torch.zeros(B, T, HV, V),
        "g": torch.zeros(B, T, HV, K),
        "beta": torch.zeros(B, T, HV),
    }


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)}
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, r"g: got shape \[1, 6, 4\], accepted: \[B, T, HV, K\]", {"g": torch.zeros(B, T, HV)}),
    (ValueError, "g: got shape", {"g": torch.zeros(B, T, H, K)}),
    (TypeError, "g: got NoneType", {"g": None}),
    (TypeError, "g: got torch.int64", {"g": torch.zeros(B, T, HV, K, dtype=torch.int64)}),
    (ValueError, r"beta: got shape \[1, 6, 4, 1\]", {"beta": torch.zeros(B, T, HV, 1)}),
    (ValueError, "beta: got shape", {"beta": torch.zeros(B, T, H)}),
    (TypeError, "beta: got NoneType", {"beta": None}),
    (ValueError, r"q: got shape \[1, 6, 8\]", {"q": torch.zeros(B, T, K)}),
    (ValueError, "q: got shape", {"q": torch.zeros(B, 0, H, K)}),
    (ValueError, "q: got shape", {"q": torch.zeros(B, T, H, 0)}),
    (ValueError, "k: got shape", {"k": torch.zeros(B, T, HV, K)}),
    (ValueError, "v: got shape", {"v": torch.zeros(B, T + 1, HV, V)}),
    (ValueError, "v: got shape", {"v": torch.zeros(B, T, HV, 0)}),
    (ValueError, "v: got 3 heads, accepted: a multiple of the 2", {"v": torch.zeros(B, T, 3, V)}),
    (TypeError, "v: got torch.int32", {"v": torch.zeros(B, T, HV, V, dtype=torch.int32)}),
    (TypeError, "k: got list", {"k": [1.0]}),
    (ValueError, "k: got a tensor on meta", {"k": torch.zeros(B, T, H, K, device="meta")}),
    (TypeError, "scale: got Tensor", {"scale": torch.ones(1)}),
    (ValueError, "initial_state: got shape", {"initial_state": torch.zeros(B, HV, V, K)}),
    (ValueError, "initial_state: got shape", {"initial_state": torch.zeros(B, H, K, V)}),
    (TypeError, "initial_state: got torch.bfloat16", {"initial_state": torch.zeros(B, HV, K, V).bfloat16()}),
    (TypeError, "A_log: got NoneType", {"use_gate_in_kernel": True}),
    (ValueError, "A_log: got shape", {"use_gate_in_kernel": True, "A_log": torch.zeros(H)}),
    (ValueError, r"dt_bias: got shape \[4\], accepted: \[HV·K\]", {**GATE, "dt_bias": torch.zeros(HV)}),
    (ValueError, "A_log, dt_bias: got a tensor", {"A_log": torch.zeros(HV)}),
    (ValueError, "A_log, dt_bias: got a tensor", {"dt_bias": torch.zeros(HV * K)}),
    (ValueError, "allow_neg_eigval", {"allow_neg_eigval": True}),
    (TypeError, "cu_seqlens: got torch.float32", {"cu_seqlens": torch.tensor([0.0, 6.0])}),
    (TypeError, "cu_seqlens: got list", {"cu_seqlens": [0, 6]}),
    (ValueError, "cu_seqlens: got shape", {"cu_seqlens": torch.tensor([[0, 6]])}),
    (ValueError, "cu_seqlens: got shape", {"cu_seqlens": torch.tensor([0])}),
    (ValueError, r"cu_seqlens: got \[1, 6\]", {"cu_seqlens": torch.tensor([1, 6])}),
    (ValueError, r"cu_seqlens: got \[0, 5\]", {"cu_seqlens": torch.tensor([0, 5])}),
    (ValueError, r"cu_seqlens: got \[0, 4, 3, 6\]", {"cu_seqlens": torch.tensor([0, 4, 3, 6])}),
    (
        ValueError,
        "initial_state: got shape",
        {"cu_seqlens": torch.tensor([0, 3, 6]), "initial_state": torch.zeros(1, HV, K, V)},
    ),
    (ValueError, "backend: got 'triton' for cpu", {"backend": "triton"}),
    (ValueError, "backend: got 'cuda', accepted: auto, triton, torch, reference", {"backend": "cuda"}),
    (TypeError, "chunk_size", {"chunk_size": 64}),
    (TypeError, "normalize", {"normalize": True}),
]


@pytest.mark.parametrize(("kind", "message", "change"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_kda_refuses(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        chunk_kda(**{**kda_arguments(), **change})


def test_kda_accepts_what_the_cases_start_from() -> None:
    o, state = chunk_kda(**kda_arguments(), **GATE, dt_bias=torch.zeros(HV * K), output_final_state=True)
    assert o.shape == (B, T, HV, V) and state is not None and state.shape == (B, HV, K, V)


def test_packing_takes_one_row() -> None:
    doubled = {name: x.expand(2, *x.shape[1:]) for name, x in kda_arguments().items()}
    with pytest.raises(ValueError, match="cu_seqlens: got a batch of 2"):
        chunk_kda(**doubled, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    ("message", "rule", "decay", "extra"),
    [
        ("rule: got 'hebbian', accepted: additive, delta", "hebbian", "none", {}),
        ("decay: got 'head', accepted: none, scalar, channel", "delta", "head", {}),
        ("g, use_gate_in_kernel", "delta", "none", {"g": torch.zeros(B, T, HV)}),
        ("g, use_gate_in_kernel", "delta", "none", GATE),
        (r"g: got shape \[1, 6, 4, 8\]", "delta", "scalar", {"g": torch.zeros(B, T, HV, K)}),
        ("beta, use_beta_sigmoid_in_kernel", "additive", "none", {}),
        ("normalize: got True", "delta", "none", {"normalize": True}),
        (r"dt_bias: got shape \[32\]", "delta", "scalar", {**GATE, "dt_bias": torch.zeros(HV * K)}),
    ],
)
def test_options_must_fit_the_cell(form: Any, message: str, rule: str, decay: str, extra: dict[str, Any]) -> None:
    arguments = kda_arguments() | {"g": torch.zeros(B, T, HV) if decay == "scalar" else None} | extra
    with pytest.raises(ValueError, match=message):
        form(**arguments, rule=rule, decay=decay)


@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_in_place(form: Any, backend: str) -> None:
    """The state that was given is the one that comes back; there has to be one, and no gradient."""
    options: dict[str, Any] = {"rule": "delta", "decay": "channel", "backend": backend, "output_final_state": True}
    arguments = kda_arguments() | {"initial_state": torch.randn(B, HV, K, V)}
    o, state = form(**arguments, **options)
    given = arguments["initial_state"].clone()
    same_o, same = form(**{**arguments, "initial_state": given}, **options, inplace_state=True)
    assert same is given
    assert torch.equal(same_o, o) and torch.equal(same, state)
    with pytest.raises(ValueError, match="inplace_state: got True without initial_state"):
        form(**kda_arguments(), **options, inplace_state=True)
    given.requires_grad_()
    with pytest.raises(ValueError, match="inplace_state: got True and inputs that require gradients"):
        form(**{**arguments, "initial_state": given}, **options, inplace_state=True)


def test_normalized_state_has_one_more_column() -> None:
    x = kda_arguments()
    with pytest.raises(ValueError, match=r"initial_state: got shape \[1, 4, 8, 5\].*here \[1, 4, 8, 6\]"):
        kernels.chunk_linear_attn(x["q"], x["k"], x["v"], initial_state=torch.zeros(B, HV, K, V))


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_signature_of_the_gated_delta_rules(form: str, name: str) -> None:
    """Positions, so that the functions stand in for flash-linear-attention's."""
    parameters = inspect.signature(getattr(kernels, f"{form}_{name}")).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
    ]


@pytest.mark.parametrize("name", [name for name in kernels.__all__ if name.startswith(("chunk", "fused"))])
def test_nothing_is_swallowed(name: str) -> None:
    parameters = inspect.signature(getattr(kernels, name)).parameters.values()
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def test_resolve_backend_on_a_cpu() -> None:
    assert BACKENDS == ("auto", "triton", "torch", "reference")
    for device in ("cpu", torch.device("cpu"), torch.device("meta")):
        assert resolve_backend("auto", device) == resolve_backend("torch", device) == "torch"
        assert resolve_backend("reference", device) == "reference"
    refused = "backend: got 'triton' for cpu, which needs an NVIDIA GPU; accepted here: auto, torch, reference"
    for device in ("cpu", torch.device("cpu")):
        with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
            resolve_backend("triton", device)


@pytest.mark.parametrize("form", [chunk, fused_recurrent], ids=lambda form: form.__name__)
def test_auto_is_torch_on_a_cpu(form: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (torch.rand(x.shape, generator=rng) for x in kda_arguments().values())
    results = [form(q, k, v, -g, beta, rule="delta", decay="channel", backend=x)[0] for x in ("auto", "torch")]
    assert torch.equal(*results)


def test_boundaries_are_read_once() -> None:
    """And again after a change in place, for another T, or from another tensor with the same values."""
    cu_seqlens = torch.tensor([0, 2, 6])
    first = read_cu_seqlens(cu_seqlens, 1, 6)
    assert first == [0, 2, 6]
    reads: list[torch.Tensor] = []

    class Watched(torch.Tensor):
        def tolist(self) -> Any:
            reads.append(self)
            return super().tolist()

    watched = cu_seqlens.as_subclass(Watched)
    for _ in range(3):
        assert read_cu_seqlens(watched, 1, 6) == [0, 2, 6]
    assert len(reads) == 1
    watched[1] = 3
    assert read_cu_seqlens(watched, 1, 6) == [0, 3, 6] and len(reads) == 2
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 3, 6\], accepted: .*T = 7"):
        read_cu_seqlens(watched, 1, 7)
    assert read_cu_seqlens(cu_seqlens.clone(), 1, 6) == [0, 3, 6]


def test_boundaries_made_in_inference_mode_may_have_changed() -> None:
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 2, 6])
        assert read_cu_seqlens(cu_seqlens, 1, 6) == [0, 2, 6]
        cu_seqlens[1] = 3
        assert read_cu_seqlens(cu_seqlens, 1, 6) == [0, 3, 6]


def test_wrong_boundaries_are_refused_every_time() -> None:
    """Also where the same tensor was right before, and where what is wrong is not its values."""
    cu_seqlens = torch.tensor([0, 2, 6])
    arguments = kda_arguments()
    chunk_kda(**arguments, cu_seqlens=cu_seqlens)
    for wrong in (7, -1):
        cu_seqlens[1] = wrong
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"cu_seqlens: got \[0, {wrong}, 6\]"):
                chunk_kda(**arguments, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 2
    o, _ = chunk_kda(**arguments, cu_seqlens=cu_seqlens)
    assert o.shape == (B, T, HV, V)
    with pytest.raises(ValueError, match="cu_seqlens: got a batch of 2"):
        read_cu_seqlens(cu_seqlens, 2, 6)


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (ValueError, "x: got shape", {"x": torch.zeros(6, 5)}),
        (ValueError, "weight: got shape", {"weight": torch.zeros(4, 5)}),
        (ValueError, "weight: got width 9", {"weight": torch.zeros(5, 9)}),
        (ValueError, "weight: got shape", {"weight": torch.zeros(5, 0)}),
        (ValueError, "bias: got shape", {"bias": torch.zeros(5, 1)}),
        (ValueError, "activation: got 'relu', accepted: silu", {"activation": "relu"}),
        (ValueError, "initial_state: got shape", {"initial_state": torch.zeros(2, 4, 5)}),
        (TypeError, "initial_state: got torch.float64", {"initial_state": torch.zeros(2, 3, 5).double()}),
        (ValueError, "cu_seqlens: got a batch of 2", {"cu_seqlens": torch.tensor([0, 6])}),
        *(
            (ValueError, "sizes: got .*accepted: 1 to 3 numbers from 1 on that add up to D = 5$", {"sizes": sizes})
            for sizes in ([2, 2], [], [0, 5], [6, -1], [1, 1, 1, 2])
        ),
        (ValueError, r"backend: got 'triton' for cpu, .*accepted here: auto, torch, reference$", {"backend": "triton"}),
    ],
)
def test_short_convolution_refuses(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        short_convolution(**{"x": torch.zeros(2, 6, 5), "weight": torch.zeros(5, 4), **change})


@pytest.mark.parametrize(
    ("kind", "message", "change"),
    [
        (ValueError, "q: got shape", {"q": torch.zeros(1, 6, 8)}),
        (ValueError, "k: got shape", {"k": torch.zeros(1, 6, 2, 4)}),
        (ValueError, "v: got shape", {"v": torch.zeros(1, 6, 4, 8)}),
        (ValueError, "q: got 3 heads", {"q": torch.zeros(1, 6, 3, 8)}),
        (ValueError, "q: got T = 7 queries for S = 6 keys", {"q": torch.zeros(1, 7, 4, 8)}),
        (ValueError, "cu_seqlens: got T = 2", {"q": torch.zeros(1, 2, 4, 8), "cu_seqlens": torch.tensor([0, 2])}),
        (TypeError, "scale: got str", {"scale": "auto"}),
        (ValueError, "backend: got 'cudnn', accepted: auto, triton, torch, reference$", {"backend": "cudnn"}),
        (ValueError, "window: got 0, accepted: a whole number from 1 on", {"window": 0}),
    ],
)
def test_softmax_attention_refuses(kind: type[Exception], message: str, change: dict[str, Any]) -> None:
    keys = torch.zeros(1, 6, 2, 8)
    with pytest.raises(kind, match=message):
        softmax_attention(**{"q": torch.zeros(1, 6, 4, 8), "k": keys, "v": keys, **change})
