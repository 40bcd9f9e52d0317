"""The device code of the GPU engine, and how it is called.

ops.py              what the forward pass asks of a device, and the kernels' answer
twins.py            the same in plain torch: what the kernels are compared with
shapes.py           how much of the work a program takes at a time
launches.py         launches that are repeated for every layer
hopper.py           descriptors and scratch memory of Hopper's kernels

products.py         products of one row; norms and SiLU around those of more
decode.py           attention of decoding
prefill.py          attention of prompts
codes.py            FP8: parts of both
sampling.py         tokens from logits
hopper_products.py  products of few rows, in Gluon
hopper_prefill.py   attention of prompts, in Gluon

Only the files of kernels need Triton, and are imported where a GPU computes. Of the runner all these know nothing but
its `inputs`.
"""
