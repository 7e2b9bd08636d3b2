"""Questions with known answers, from public sets or local files of the same form, through `datasets`.

    lambada  {"text"}: the last word is to be said (Paperno et al. 2016)
    squad    {"context", "question", "answers": {"text": […]}}, or SQuAD's own nested JSON; or {"text", "value"}, a text
             that ends where the answer begins, as in Based's sets (Arora et al. 2024, arXiv 2402.18668)
    fda swde {"text", "value"}: a fact of the document above it
    names    of any text: a name that has come before (`names_seen_before`)

A hub name needs the network or a filled cache; local files need neither.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.corpora import FORMATS, find_files
from data.errors import DataError

# By name: the hub's name, its configuration, and its split.
HUB: dict[str, tuple[str, str | None, str]] = {
    "lambada": ("EleutherAI/lambada_openai", None, "test"),
    "squad": ("hazyresearch/based-squad", None, "validation"),
    "fda": ("hazyresearch/based-fda", None, "validation"),
    "swde": ("hazyresearch/based-swde", None, "validation"),
}
# A capitalised word that does not begin a sentence.
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}")
TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
LOADERS = {suffix: kind for suffix, kind in sorted(FORMATS.items()) if kind != "text"}  # text has no keys


@dataclass(frozen=True)
class Question:
    prompt: str  # ends where the answer begins, before the space
    answers: tuple[str, ...]  # any of them will do


def questions(name: str, files: str | Sequence[str] | None, cache_dir: Path, base_dir: Path) -> list[Question]:
    """The questions of the set `name`, from `files` instead of the hub if they are given.

    Raises DataError: no such set; not to be had; rows of another form, with what they have.
    """
    if name not in HUB:
        raise DataError(f"set is {name!r}: it takes one of {', '.join(HUB)}")
    rows = _local(files, cache_dir, base_dir) if files is not None else _from_hub(name, cache_dir)
    found = list(_last_words(rows) if name == "lambada" else _documents(rows))
    if not found:
        raise DataError(f"no questions in {files or HUB[name][0]}")
    return found


def names_seen_before(documents: Iterable[str], characters: int) -> list[Question]:
    """Each name of a document where it comes again: the `characters` before it hold it, and end where it is to be said.

    A name is a capitalised word within a sentence; what stands alone or in another case does not count as seen.
    """
    found = []
    for text in documents:
        for match in NAME.finditer(text):
            before = text[max(0, match.start() - characters) : match.start()]
            if re.search(rf"\b{match[0]}\b", before):
                found.append(Question(before.rstrip(), (match[0],)))
    return found


def _from_hub(name: str, cache_dir: Path) -> Iterable[Mapping[str, Any]]:
    import datasets  # here, not above: it takes two seconds

    path, config, split = HUB[name]
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            path, config, split=split, cache_dir=str(cache_dir / "datasets")
        )
    except Exception as error:  # offline, moved, gated: the library and its network raise what they like
        raise DataError(
            f"cannot load {path} from the hub ({type(error).__name__}): give local files of the same form with files="
        ) from None
    return rows


def _local(files: str | Sequence[str], cache_dir: Path, base_dir: Path) -> Iterator[Mapping[str, Any]]:
    import datasets

    paths = find_files([files] if isinstance(files, str) else list(files), base_dir)
    for path in paths:
        kind = LOADERS.get(path.suffix.lower())
        if kind is None:
            raise DataError(f"{path.name}: questions come from {', '.join(LOADERS)} files")
        # SQuAD's own files are one object, with what is wanted in a list under "data".
        nested = {"field": "data"} if path.suffix.lower() == ".json" and _is_object(path) else {}
        try:
            yield from datasets.load_dataset(
                kind, data_files=[str(path)], split="train", cache_dir=str(cache_dir / "datasets"), **nested
            )
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"cannot read {path}: {error.__cause__ or error}") from None


def _is_object(path: Path) -> bool:
    """Whether one JSON object is all of the file, and not one a line."""
    with path.open(encoding="utf-8") as file:
        head = file.read(1 << 16).lstrip()
    return head.startswith("{") and '"data"' in head and '"paragraphs"' in head


def _last_words(rows: Iterable[Mapping[str, Any]]) -> Iterator[Question]:
    for row in rows:
        prompt, _, word = _text(row, "text").rstrip().rpartition(" ")
        if prompt:
            yield Question(prompt, (word,))


def _documents(rows: Iterable[Mapping[str, Any]]) -> Iterator[Question]:
    for row in rows:
        if "paragraphs" in row:
            for paragraph in row["paragraphs"]:
                for asked in paragraph["qas"]:
                    texts = [answer["text"] for answer in asked["answers"]]
                    yield _asked(paragraph["context"], asked["question"], texts)
        elif "value" in row:
            yield Question(_text(row, "text").rstrip(), (row["value"].strip(),))
        elif "answers" in row:
            yield _asked(_text(row, "context"), _text(row, "question"), row["answers"]["text"])
        else:
            raise _form(row)


def _asked(context: str, question: str, answers: Sequence[str]) -> Question:
    unique = tuple(dict.fromkeys(answer.strip() for answer in answers))
    return Question(TEMPLATE.format(context=context, question=question.strip()), unique)


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise _form(row)
    text: str = row[key]
    return text


def _form(row: Mapping[str, Any]) -> DataError:
    forms = '{"text"} for lambada, else {"context", "question", "answers"} or {"text", "value"}'
    return DataError(f"questions have the keys {', '.join(map(str, row))}: it takes {forms}")
