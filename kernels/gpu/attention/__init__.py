"""Softmax attention in Triton.

| file         | what                                                             |
|--------------|------------------------------------------------------------------|
| operators.py | which kernels run, on which memory; autograd, torch operators    |
| forward.py   | o and its log-sum-exp                                            |
| hopper.py    | the same for Hopper, with its TMA unit and groups of warps       |
| backward.py  | d_q with the row products δ, then d_kv: no atomics               |
| decode.py    | new tokens over a cache, which is split among programs           |
| blocks.py    | what they share: where a program works, what a query sees        |
| tiles.py     | how they are compiled                                            |
"""
