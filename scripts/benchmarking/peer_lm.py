"""flash-linear-attention's language models at our sizes, behind what TrainingModule asks of a model.

A pattern of one recurrent kind, with softmax layers or without, is that kind's model; softmax alone is the Transformer.
Layers, width, heads, MLP, vocabulary and the tied embedding are ours, and the options those meant to be fastest: fused
norms, MLP and loss, and KDA's bounded gate, which ours doesn't need. What stays different: fla convolves q, k and v one
by one, has a norm after linear attention, none of q and k in a hybrid's softmax layers, and no target for the last
token of a row.

Of its fused losses, "logits" keeps all logits; "linear" computes the head's gradient from a chunk of them at a time,
and so takes less memory, but does so in float32 products where the weights are float32, as under autocast.

Its softmax attention needs the package flash_attn; where that is not installed, torch's scaled_dot_product_attention
takes its place.
"""

import importlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kda_lm.config import read_config
from kda_lm.errors import UserError
from kda_lm.model import LMConfig

# kind: the prefix of the classes, and options beside the sizes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("Transformer", {"qk_norm": True}),
    "kda": ("KDA", {"safe_gate": True, "lower_bound": -5.0}),
    "gated_delta": ("GatedDeltaNet", {"expand_v": 1.0}),
    "delta": ("DeltaNet", {}),
    "linear": ("LinearAttention", {"feature_map": "elu", "norm_feature_map": True, "attn_mode": "chunk"}),
}
LOSSES = ("logits", "linear")
HEAD_DIM = ("kda", "gated_delta")  # others divide the width among their heads


class PeerLM(nn.Module):
    """A causal LM of fla's with `loss`, `embedding` and `head` as kda_lm.model.LM has them."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.embedding: nn.Embedding = lm.model.embeddings
        self.head: nn.Linear = lm.lm_head

    def loss(self, tokens: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """Sum of −log p(target) and the number of targets, as LM.loss; fla shifts the labels by itself."""
        if z_loss:
            raise UserError(f"optim.z_loss is {z_loss}; fla's fused loss takes 0")
        count = (targets != -100).sum()
        return self.lm(input_ids=tokens, labels=tokens, use_cache=False).loss * count, count


def build(
    model: dict[str, Any],
    head_dim: int,
    seq_len: int,
    loss: str = "logits",
    compiled: bool = False,
    checkpointed: bool = False,
) -> PeerLM:
    """The peer of our model with the options `model`.

    Raises ImportError: fla, or what it needs, is not installed; UserError: it has no such model.
    """
    config = read_config(LMConfig, model, "model")
    layers = [config.pattern[i % len(config.pattern)] for i in range(config.num_layers)]
    kinds = [kind for kind in dict.fromkeys(layers) if kind != "softmax"] or ["softmax"]
    if len(kinds) > 1 or kinds[0] not in MODELS:
        raise UserError(f"fla has no model of {', '.join(kinds)}; it has one of each of {', '.join(MODELS)}")
    kind, heads = kinds[0], config.dim // head_dim
    prefix, options = MODELS[kind]
    softmax = [i for i, name in enumerate(layers) if name == "softmax"]
    if softmax:
        provide_attention()
    models = importlib.import_module("fla.models")
    sizes = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_heads": heads,
        "intermediate_size": config.hidden,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": seq_len,
        "use_cache": False,
        "fuse_cross_entropy": kind == "kda" and loss == "linear",  # KDA's model has one switch for both
        **({"fuse_linear_cross_entropy": loss == "linear"} if kind != "kda" else {}),
        **({"head_dim": head_dim} if kind in HEAD_DIM else {}),
        **({"attn": {"layers": softmax, "num_heads": heads}} if softmax and kind != "softmax" else {}),
    }
    lm = getattr(models, f"{prefix}ForCausalLM")(getattr(models, f"{prefix}Config")(**sizes, **options))
    if loss == "logits":
        lm.criterion = importlib.import_module("fla.modules").FusedCrossEntropyLoss(inplace_backward=True)
    if checkpointed:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        for layer in lm.model.layers:
            layer.compile()
    return PeerLM(lm)


def provide_attention() -> None:
    """Where flash_attn is missing, have fla call torch instead."""
    attention: Any = importlib.import_module("fla.layers.attn")
    if attention.flash_attn_func is None:
        attention.flash_attn_func = torch_attention


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """flash_attn_func of fla's call without a window: q, k, v and o [B, T, H, D]."""
    assert window_size == (-1, -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
