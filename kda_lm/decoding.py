"""Decoding in place: prompts of any lengths at once, then token by token, nothing computed twice.

    decoder = Decoder(model, capacity=2048)
    logits = decoder.prefill([[5, 3, 9], [7]])       the prompts, in chunks; logits [B, vocab] of what follows each
    logits = decoder.step(tokens)                    a token [B] for each row
    logits = decoder.append(tokens)                  several tokens [B, T] for each row; logits [B, T, vocab]

Prompts of unequal length are packed one behind the other (`cu_seqlens`): there are no padding tokens that could enter a
state. What decoding carries lies in memory that is allocated once: a state a recurrent layer, whose size does not
depend on the number of tokens, and `capacity` rows of keys and values a softmax layer, read up to each row's length.

On a GPU a step of the whole model is recorded as one CUDA graph when first made, and replayed from then on: hundreds of
kernels are started by one call, which takes microseconds of the host. Under autocast the matrices are rounded to its
dtype once, when the decoder is made; the results are those of rounding them at every use.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from kda_lm.layers import JointLinear, autocast_dtype
from kda_lm.mixers import MixerState
from kda_lm.model import LM


class Decoder:
    """See the module's docstring. Some weights are copied when the decoder is made, the others are the model's own: it
    is not to be trained, changed or moved as long as the decoder is in use.

    Args:
        model: decoded in its own dtype, or in autocast's where that is enabled when the decoder is made.
        capacity: the most tokens a row may have, prompt included, where a layer's memory grows with them.
        cuda_graph: record and replay steps; None: on a GPU.
    """

    @torch.inference_mode()
    def __init__(self, model: LM, capacity: int, cuda_graph: bool | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it takes at least 1")
        self.device = model.embedding.weight.device
        if cuda_graph and self.device.type != "cuda":
            raise ValueError(f"cuda_graph: got True on {self.device}, accepted: only on a GPU")
        self._dtype = autocast_dtype(model.embedding.weight)
        self.model = _fixed(model, self._dtype)
        self.capacity = capacity
        self.cuda_graph = self.device.type == "cuda" if cuda_graph is None else cuda_graph
        self._bounded = any(mixer.grows for mixer in model.layers())
        self._longest = 0  # tokens of the longest row, known without asking the GPU
        self.caches: list[MixerState] = []  # of each layer, one row a sequence
        self._lengths = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def batch(self) -> int:
        """Rows; 0 before the first prompts."""
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far."""
        lengths: list[int] = self._lengths.tolist()
        return lengths

    @property
    def cache_bytes(self) -> int:
        """Bytes of all states and caches, as allocated."""
        return sum(x.nbytes for cache in self.caches for x in cache if x is not None)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start anew with one row a prompt: the logits [B, vocab] of the token after each.

        Raises ValueError: no prompts, an empty one, or one beyond the capacity.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or not min(lengths):
            raise ValueError("prompts: got an empty one or none, accepted: at least one token each")
        self._check_room(max(lengths))
        packed = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        with self._arithmetic():
            if min(lengths) == max(lengths):
                x, states = self.model.hidden_states(packed.view(len(lengths), -1))
                last = x[:, -1]
            else:
                bounds = _boundaries(lengths, self.device)
                x, states = self.model.hidden_states(packed[None], cu_seqlens=bounds)
                last = x[0, bounds[1:] - 1]
            logits = self.model.logits(last)
        self._take_over(states, lengths)
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """One more token of every row: tokens [B] → logits [B, vocab] of the next.

        From a CUDA graph the logits lie where the next step will write its own.
        """
        self._check(tokens, (self.batch,))
        self._check_room(self._longest + 1)
        if not self.cuda_graph:
            logits = self._decode(tokens[:, None])[:, 0]
        else:
            with torch.cuda.device(self.device):
                graph = self._graph or self._record()
                self._tokens.copy_(tokens)
                graph.replay()
            logits = self._logits
        self._longest += 1
        return logits

    @torch.inference_mode()
    def append(self, tokens: Tensor) -> Tensor:
        """Several more tokens of every row at once: tokens [B, T] → logits [B, T, vocab]."""
        self._check(tokens, (self.batch, -1))
        self._check_room(self._longest + tokens.shape[1])
        logits = self._decode(tokens)
        self._longest += tokens.shape[1]
        return logits

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Go on as if every row had so many tokens, whatever is in states and caches: for measuring."""
        self._check_room(length)
        self._lengths.fill_(length)
        self._longest = length

    def _decode(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        positions = self._lengths[:, None] + torch.arange(T, device=self.device)
        with self._arithmetic():
            logits = self.model.decode(tokens, self.caches, positions)
        self._lengths += T
        return logits

    def _record(self) -> torch.cuda.CUDAGraph:
        """One step as a CUDA graph, which reads `_tokens` and writes `_logits`.

        What a graph is to hold has to have run before, to be compiled; that run is undone.
        """
        self._tokens = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        states = self._states()
        kept = [x.clone() for x in states]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(self._tokens[:, None])
        torch.cuda.current_stream().wait_stream(stream)
        self._lengths -= 1
        for x, before in zip(states, kept, strict=True):
            x.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a data loader's, may go on with what a capture of their own would not allow.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._logits = self._decode(self._tokens[:, None])[:, 0]
        self._graph = graph
        return graph

    def _take_over(self, states: list[MixerState], lengths: list[int]) -> None:
        """The prompts' states go into the caches, which are new if there were none for as many rows."""
        layers = self.model.layers()
        if len(lengths) != self.batch:
            self._graph = None
            self.caches = [
                mixer.new_cache(state, len(lengths), self.capacity) for mixer, state in zip(layers, states, strict=True)
            ]
            self._lengths = torch.empty(len(lengths), dtype=torch.int64, device=self.device)
        self._lengths.copy_(torch.tensor(lengths))
        self._longest = max(lengths)
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        for mixer, cache, state in zip(layers, self.caches, states, strict=True):
            mixer.fill_cache(cache, state, rows, positions)

    def _states(self) -> list[Tensor]:
        """What a step changes and the next one reads: not what it adds at the end of a cache."""
        layers = zip(self.model.layers(), self.caches, strict=True)
        changed = [x for mixer, cache in layers for x in ((cache.conv,) if mixer.grows else cache)]
        return [x for x in changed if x is not None]

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not None, cache_enabled=False)

    def _check(self, tokens: Tensor, shape: tuple[int, ...]) -> None:
        if not self.batch:
            raise ValueError("there is nothing to go on from: prefill comes first")
        if tokens.dim() != len(shape) or tokens.shape[0] != shape[0] or not tokens.numel():
            axes = "[B, T]" if len(shape) == 2 else "[B]"
            raise ValueError(f"tokens: got shape {list(tokens.shape)}, accepted: {axes} with B = {self.batch}")

    def _check_room(self, length: int) -> None:
        if self._bounded and length > self.capacity:
            raise ValueError(f"a row would have {length} tokens, but the decoder was made for {self.capacity}")


def _boundaries(lengths: list[int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor that can be seen not to have changed is read once
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _fixed(model: LM, dtype: torch.dtype | None) -> LM:
    """`model` with its matrices in `dtype` and the joint ones laid out; everything else is shared with it."""
    joint = {id(layer) for module in model.modules() if isinstance(module, JointLinear) for layer in module.layers}
    shared = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():
        if dtype is not None and isinstance(module, nn.Linear) and id(module) not in joint:
            shared[id(module.weight)] = nn.Parameter(module.weight.to(dtype), requires_grad=False)
    fixed: LM = copy.deepcopy(model, cast(dict[int, object], shared))
    fixed.embedding.weight = model.embedding.weight  # where it is the head's, too: rows are read as they are
    for module in fixed.modules():
        if isinstance(module, JointLinear):
            module.fix(dtype)
    return fixed
