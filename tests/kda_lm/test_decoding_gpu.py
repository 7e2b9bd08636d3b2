"""Decoding on a GPU, by CUDA graphs and without: skipped, visibly, where there is none."""

import pytest
import torch
from support import KINDS, PUBLISHED, error, small_options, tiny_lm

from kda_lm.decoding import Decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of a pass over everything at once


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_graphs_change_nothing(kind: str, autocast: bool) -> None:
    """Steps from a graph have the bits of steps without, for new prompts too, and stay with the whole pass."""
    model = tiny_lm(KINDS[kind], dim=64, layers=2).cuda()
    bound = BOUNDS[torch.bfloat16 if autocast else torch.float32]
    lengths = [5, 1, 70, 2]
    for seed in range(2):
        ids = torch.randint(29, (4, 90), generator=torch.Generator().manual_seed(seed)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            wholes = [model(row[None])[0][0] for row in ids]
            if seed == 0:
                decoders = [Decoder(model, 90, cuda_graph=graph) for graph in (True, False)]
        prompts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
        found = [decoder.prefill(prompts) for decoder in decoders]
        for t in range(12):
            assert torch.equal(*found), t
            for i, n in enumerate(lengths):
                assert error(found[0][i], wholes[i][n + t - 1]) < bound, (i, t)
            following = torch.stack([ids[i, n + t] for i, n in enumerate(lengths)])
            found = [decoder.step(following) for decoder in decoders]
        more = torch.stack([ids[i, n + 12 : n + 15] for i, n in enumerate(lengths)])
        assert torch.equal(*(decoder.append(more) for decoder in decoders))
        assert torch.equal(*(decoder.step(more[:, 0]) for decoder in decoders))
        assert decoders[0].lengths == decoders[1].lengths == [n + 16 for n in lengths]


@pytest.mark.parametrize("kind", PUBLISHED)
@torch.inference_mode()
def test_steps_equal_the_whole_pass(kind: str) -> None:
    model = tiny_lm(small_options(kind), dim=32, layers=2).cuda()
    ids = torch.randint(0, 29, (3, 40), device="cuda")
    whole, _ = model(ids)
    decoder = Decoder(model, 40)
    logits = decoder.prefill(ids[:, :25].tolist())
    for t in range(25, 40):
        assert error(logits, whole[:, t - 1]) < BOUNDS[torch.float32], t
        logits = decoder.step(ids[:, t])
