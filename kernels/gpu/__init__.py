"""The public functions in Triton, for GPUs from sm_80 on.

| where            | what                                                                       |
|------------------|----------------------------------------------------------------------------|
| recurrence/      | any rule and decay, in chunks and token by token                           |
| attention/       | softmax attention, and decoding over a cache                               |
| short_conv.py    | the short convolution, both ways and a step                                |
| norm.py          | root-mean-square norms: plain, of a sum, gated, both ways                  |
| swiglu.py        | the gate of SwiGLU on a joint product, both ways                           |
| rotary.py        | rotary positions behind a norm, both ways                                  |
| cross_entropy.py | the loss of a linear layer's logits, a chunk at a time, with its gradients |
| launch.py        | how kernels are started                                                    |
| common.py        | gates, powers, rows: what kernels share                                    |
| limits.py        | widths that they take                                                      |

What surrounds the recurrence is bound by memory, and moves what it must and no more: with U a tensor of x's size, the
convolution 2 U forward (x → y) and 3 U backward (x dy → dx), a norm the same, a gated one 3 U and 5 U (x z dy → dx dz),
that of a sum 4 U and 5 U (x y → s z; s ds dz → dx dy, which are one in one dtype); SwiGLU 3 U and 5 U of y's size.
Of the loss at N rows and V words, 6·N·V·dim FLOP are products; the logits are written and read twice in float32, and
their gradients written and read twice: 20·N·V bytes in bf16, of which the chunk's size leaves little in the caches.
"""
