"""What a checkpoint is worth.

text.py         loss, perplexity and bits per byte
tasks.py        accuracy on the tasks of data/tasks
context.py      loss by position, and on what the context has shown
completions.py  continuations of prompts: given ones, and the likeliest
questions.py    last words, facts of documents, needles in haystacks
memory.py       the state of recurrent layers while they read
harness.py      a checkpoint as a model of the lm-evaluation-harness, which it needs
parity.py       whether all ways of computing give one answer
"""
