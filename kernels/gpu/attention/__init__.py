"""Softmax attention in Triton.

| file         | what                                                             |
|--------------|------------------------------------------------------------------|
| operators.py | which kernels run, on which memory; autograd, torch operators    |
| forward.py   | o and its log-sum-exp                                            |
| backward.py  | d_q, d_k and d_v without atomics, in one of two forms            |
| decode.py    | new tokens over a cache, which is split among programs           |
| blocks.py    | what they share: where a program works, what a query sees        |
| tiles.py     | how they are compiled                                            |
"""
