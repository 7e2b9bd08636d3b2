"""The recurrence in Triton: one family of kernels, compiled for a rule and a decay.

| file                 | when                                                                                   |
|----------------------|----------------------------------------------------------------------------------------|
| prepare.py           | channel decay, both ways: cumulative gate, queries and keys times their decays         |
| pairs.py             | forward: products between a chunk's tokens, triangular inverse                         |
| scan.py              | the chain of states, with the output; its reverse, with dV                             |
| gradients.py         | the backward's equations, and what its kernels share                                   |
| pair_gradients.py    | backward, channel decay: gradients of the products, dβ                                 |
| channel_gradients.py | backward, channel decay: dq, dk, dg                                                    |
| scalar_gradients.py  | backward, scalar decay or none: dq, dk, dg, dβ                                         |
| recurrent.py         | decoding, token by token                                                               |

chunk.py orders them, plan.py sizes them, tiles.py says how they are compiled.

What KDA must move, do and start at B×T×H×D = 8×4096×16×128 in bf16, with U = 134 MB one such tensor (31 µs at the
4.3 TB/s that an H200 copies), g in float32 (2 U), chunks of 64 tokens, a state of 2 U over all chunks:

| kernel            | reads                          | writes                    | U    | GFLOP | programs |
|-------------------|--------------------------------|---------------------------|------|-------|----------|
| prepare           | q k g                          | G q̃ k̃ k̄                   | 9    | –     | 32,768   |
| pairs             | q k G                          | W P                       | 5    | 77    | 8,192    |
| scan              | q̃ k̃ k̄ v W P                   | o S E                     | 9    | 77    | 128      |
| prepare           | q k g                          | G q̃ k̃ k̄                   | 9    | –     | 32,768   |
| reverse_scan      | q̃ k̃ k̄ dO W P                  | dV dS                     | 8    | 77    | 128      |
| pair_gradients    | dO dV E                        | Z M                       | 4.5  | 17    | 8,192    |
| channel_gradients | q k G dO dV E S dS Z M         | dq dk dg                  | 16.5 | 137   | 16,384   |

61 U or 1.9 ms at copy speed, 385 GFLOP or 0.5 ms at 790 TFLOP/s. Alive at the peak, in the gradients: S E W P o of the
forward (5 U), dS Z M dV dq dk and dg over G (8.5 U). A scalar decay or none needs neither prepare nor its outputs:
pairs 3 U, scan 8 U, reverse_scan 7 U, scalar_gradients 12 U.

With the norms in the kernels and several programs a row, pair_gradients also reads o and v (2 U).

The chain of states has only batch · heads · V / (value channels of a program) programs, each a walk through the
sequence: few heads leave multiprocessors idle.
"""
