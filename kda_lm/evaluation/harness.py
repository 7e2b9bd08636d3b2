"""A checkpoint as a model of EleutherAI's lm-evaluation-harness: the extra `lm-eval`.

Texts begin with the end-of-text token, as every document does; a rolling log-likelihood takes windows of `max_length`
tokens, each token a target once, with all the context that its window has. Generation is greedy.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM as HarnessModel
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data import Tokenizer
from kda_lm.errors import UserError
from kda_lm.evaluation.completions import BATCH_TOKENS, Pair, complete, score_continuations, split_ids
from kda_lm.model import LM

MOST_NEW = 256  # tokens, where a task does not say


class Harness(HarnessModel):
    """See the module's docstring."""

    def __init__(self, model: LM, tokenizer: Tokenizer, max_length: int, batch_tokens: int = BATCH_TOKENS) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.max_length, self.batch_tokens = max_length, batch_tokens

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Of each continuation, and whether it is the likeliest; a long context loses its beginning."""
        pairs = [self._fitted(split_ids(self.tokenizer, *request.args)) for request in requests]
        found = score_continuations(self.model, pairs, self.batch_tokens)
        return [(-x.nats, x.greedy) for x in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Of each text, its end excluded."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0]).tolist()
            windows = get_rolling_token_windows(ids, self.tokenizer.eot_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((list(context), list(continuation)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, x in zip(owners, score_continuations(self.model, pairs, self.batch_tokens), strict=True):
            totals[i] -= x.nats
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The likeliest text after each context, up to the first of what it is to stop at.

        Raises UserError: a task that wants it sampled.
        """
        found = [""] * len(requests)
        by_length: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            options = request.args[1]
            if options.get("do_sample") or options.get("temperature"):
                raise UserError(f"a task samples its answers ({options}): only do_sample: false is taken")
            by_length.setdefault(int(options.get("max_gen_toks", MOST_NEW)), []).append(i)
        for most, group in by_length.items():
            prompts = [self._last(self.tokenizer.begin(requests[i].args[0]), most) for i in group]
            drawn = complete(self.model, prompts, most, self.tokenizer.eot_id, self.batch_tokens)
            for i, prompt, ids in zip(group, prompts, drawn, strict=True):
                decoder = self.tokenizer.stream(prompt)
                text = "".join(decoder.push(token) for token in ids) + decoder.flush()
                until = requests[i].args[1].get("until") or []
                for stop in [until] if isinstance(until, str) else until:
                    text = text.partition(stop)[0] if stop else text
                found[i] = text
        return found

    def _fitted(self, pair: Pair) -> Pair:
        prompt, continuation = pair
        return self._last(prompt, len(continuation) - 1), continuation

    def _last(self, prompt: list[int], more: int) -> list[int]:
        """What of a prompt there is room for beside `more` tokens; at least one."""
        return prompt[-max(1, self.max_length - more) :]
