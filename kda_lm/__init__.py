"""The language model, and how it is trained, evaluated and sampled.

Knows the kernels through their public functions and the data through its data modules and questions; see the README's
map.
"""
