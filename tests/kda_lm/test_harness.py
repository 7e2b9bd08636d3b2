"""The adapter for the lm-evaluation-harness, on tasks that need no network; skipped, visibly, without it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import compose_config, small_options, tiny_lm

from data.tokenizers import byte_tokenizer
from kda_lm.checkpoint import open_checkpoint
from kda_lm.errors import UserError
from scripts.evaluating.lm_eval import run_lm_eval

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'kda-lm[lm-eval]'")

Run = Callable[..., tuple[dict[str, Any], Path]]
CPU = torch.device("cpu")
COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}\ntest_split: test\n"
CHOICES = COMMON + (
    "task: choices\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{label}}'\nmetric_list:\n  - metric: acc\n"
)
ROLLING = COMMON + (
    "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
)
GENERATED = COMMON + (
    "task: generated\noutput_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{said}}'\n"
    "generation_kwargs: {until: ['e'], max_gen_toks: 6, do_sample: false}\nmetric_list:\n  - metric: exact_match\n"
)
ROWS = [
    {"text": "the state of", "choices": [" the union", " every county"], "label": 0},
    {"text": "we must keep it so for all", "choices": [" people", " xyzzy", " of"], "label": 2},
]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


def harness(max_length: int = 1000) -> Any:
    from kda_lm.evaluation.harness import Harness

    model = tiny_lm(*(small_options(kind) for kind in ("kda", "softmax")), vocab_size=257)
    return Harness(model, byte_tokenizer(), max_length)


def log_p(model: Any, ids: list[int], first: int) -> float:
    """Of ids[first:] after what is before them."""
    found = model(torch.tensor([ids[:-1]]))[0][0].double().log_softmax(-1).detach()
    return float(found[first - 1 :].gather(1, torch.tensor(ids[first:])[:, None]).sum())


def test_likelihoods_by_hand() -> None:
    ours = harness()
    found = ours.loglikelihood(requests(("the state", " of"), ("", "we"), ("the", " union")))
    for (value, greedy), (context, continuation) in zip(
        found, (("the state", " of"), ("", "we"), ("the", " union")), strict=True
    ):
        ids = [256, *context.encode(), *continuation.encode()]
        assert value == pytest.approx(log_p(ours.model, ids, 1 + len(context)), rel=1e-5) and not greedy
    (short, _), (whole, _) = harness(6).loglikelihood(requests(("a long context", " of"))) + found[:1]
    assert short == pytest.approx(log_p(ours.model, [*b"text", *b" of"], 4), rel=1e-5) and short != whole


@pytest.mark.parametrize("max_length", [1000, 7])
def test_rolling_by_hand(max_length: int) -> None:
    """Each byte a target once, the first after the end-of-text token."""
    ours, text = harness(max_length), "the union is strong"
    ids, expected = [256, *text.encode()], 0.0
    if max_length == 1000:
        expected = log_p(ours.model, ids, 1)
    else:
        for start in range(0, len(text), 7):  # seven targets a window, the last window full
            end = min(start + 7, len(text))
            expected += log_p(ours.model, ids[end - 7 : end + 1], start - (end - 7) + 1)
    assert ours.loglikelihood_rolling(requests((text,)))[0] == pytest.approx(expected, rel=1e-5)


def test_generation() -> None:
    """Greedy; up to the first stop, which is left out; as long as each asks for."""
    ours = harness()
    options: dict[str, Any] = {"until": [], "max_gen_toks": 9}
    (text,) = ours.generate_until(requests(("the state", options)))
    again = ours.generate_until(requests(("the state", options), ("we", {"until": "q", "max_gen_toks": 2})))
    assert again[0] == text
    if len(text) > 3:
        (cut,) = ours.generate_until(requests(("the state", {**options, "until": ["never", text[2]]})))
        assert cut == text.partition(text[2])[0]
    with pytest.raises(UserError, match="a task samples its answers"):
        ours.generate_until(requests(("the", {"do_sample": True})))


def test_the_command(run: Run, tmp_path: Path) -> None:
    _, folder = run("trained")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "said": "?"}) + "\n" for row in ROWS))
    for name, text in (("choices", CHOICES), ("rolling", ROLLING), ("generated", GENERATED)):
        (tasks / f"{name}.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    ckpt = folder / "checkpoints" / "last.ckpt"

    def command(*words: str) -> Any:
        return run_lm_eval(compose_config("lm_eval", f"ckpt={ckpt}", "accelerator=cpu", "include_path=tasks", *words))

    results = command("tasks=[choices,rolling,generated]", "json=out.json")
    model = open_checkpoint(ckpt, CPU).model
    right, total, size = 0, 0.0, 0
    for row in ROWS:
        text = str(row["text"])
        scores = [
            log_p(model, [256, *text.encode(), *str(choice).encode()], 1 + len(text))
            for choice in row["choices"]  # type: ignore[attr-defined]
        ]
        right += scores.index(max(scores)) == row["label"]
        total, size = total + log_p(model, [256, *text.encode()], 1), size + len(text)
    assert results["choices"]["acc,none"] == right / 2
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert results["generated"]["exact_match,none"] == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"].keys() == results.keys()
    for words, said in (
        (["tasks=[chess]"], "the harness has no 'chess'"),
        (["tasks=[]"], "tasks is empty"),
        (["tasks=[choices]", "limit=0"], "limit is 0"),
    ):
        with pytest.raises(UserError, match=said):
            command(*words)
