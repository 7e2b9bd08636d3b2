"""Softmax attention in Triton.

| file               | what                                                             |
|--------------------|------------------------------------------------------------------|
| operators.py       | which kernels run, on which memory; autograd, torch operators    |
| forward.py         | o and its log-sum-exp                                            |
| backward.py        | d_q with the row products δ, then d_kv: no atomics               |
| hopper_forward.py  | the forward for Hopper, with its TMA unit and groups of warps    |
| hopper_backward.py | the backward likewise: d_kv, which keeps dS, then d_q            |
| hopper.py          | what these two share                                             |
| decode.py          | new tokens over a cache, which is split among programs           |
| blocks.py          | what the others share: where a program works, what a query sees  |
| tiles.py           | how they are compiled                                            |
"""
