"""Draw the derivation: what a memory of outer products gives back, from additive writes to per-channel forgetting.

    python scripts/derivation.py [--out docs/derivation.svg]

No checkpoint, no training: the kernels' own recurrence on keys and values that are chosen by hand. `read(key)` is Sᵀ k;
curves show its share of a value v, v·Sᵀk / ‖v‖², so 1 is the value as it was written and 0 nothing of it.
docs/derivation.md says what is seen; tests hold the numbers in it to what this draws.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

import kernels

SIZE = 16  # channels of keys and of values
OVERLAPS = torch.linspace(0, 1, 21)
SCALAR = -0.2  # log-decay a token, of everything


@dataclass(frozen=True)
class Write:
    key: Tensor
    value: Tensor


def unit(i: int) -> Tensor:
    return torch.eye(SIZE, dtype=torch.float64)[i]


def states(writes: list[Write], rule: str, g: Tensor | None = None) -> Tensor:
    """The state after each write [n, K, V], at write strength 1; `g` is the log-decay of every token, [] or [K]."""
    decay = "none" if g is None else "channel" if g.dim() else "scalar"
    found = []
    for n in range(1, len(writes) + 1):
        k = torch.stack([write.key for write in writes[:n]])[None, :, None]
        v = torch.stack([write.value for write in writes[:n]])[None, :, None]
        options: dict[str, Any] = {}
        if g is not None:
            options["g"] = g.expand(1, n, 1, *g.shape)
        if rule == "delta":
            options["beta"] = torch.ones(1, n, 1, dtype=k.dtype)
        _, state = kernels.fused_recurrent(
            k, k, v, rule=rule, decay=decay, output_final_state=True, backend="reference", **options
        )
        assert state is not None
        found.append(state[0, 0].double())
    return torch.stack(found)


def share(state: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of `value` in what the states [..., K, V] give for `key`."""
    return (key @ state) @ value / value.dot(value)


def again() -> dict[str, list[float]]:
    """One pair, written five times."""
    pair = Write(unit(0), unit(0))
    return {rule: share(states([pair] * 5, rule), unit(0), unit(0)).tolist() for rule in ("additive", "delta")}


def replaced() -> dict[str, list[float]]:
    """A key that gets a new value at the third of five writes: the shares of the old and of the new one."""
    old, new = Write(unit(0), unit(0)), Write(unit(0), unit(1))
    writes = [old, Write(unit(5), unit(5)), new, Write(unit(6), unit(6)), Write(unit(7), unit(7))]
    found = {}
    for rule in ("additive", "delta"):
        state = states(writes, rule)
        found[f"{rule}, old value"] = share(state, unit(0), unit(0)).tolist()
        found[f"{rule}, new value"] = share(state, unit(0), unit(1)).tolist()
    return found


def untouched() -> dict[str, list[float]]:
    """What a key reads after a write to another at each of OVERLAPS, their cosine: its own value and the other's."""
    found: dict[str, list[float]] = {
        f"{rule}, {whose} value": [] for rule in ("additive", "delta") for whose in ("own", "other")
    }
    for cosine in OVERLAPS.double():
        other = cosine * unit(0) + (1 - cosine**2).clamp(min=0).sqrt() * unit(1)
        for rule in ("additive", "delta"):
            state = states([Write(unit(0), unit(0)), Write(other, unit(1))], rule)[-1]
            found[f"{rule}, own value"].append(float(share(state, unit(0), unit(0))))
            found[f"{rule}, other value"].append(float(share(state, unit(0), unit(1))))
    return found


def forgotten() -> dict[str, list[float]]:
    """Two pairs, their keys in other halves of the channels, then eight tokens that write nothing."""
    first, second = Write(unit(0), unit(0)), Write(unit(SIZE - 1), unit(1))
    nothing = Write(unit(0), torch.zeros(SIZE, dtype=torch.float64))
    writes = [first, second] + [nothing] * 8
    half = torch.zeros(SIZE, dtype=torch.float64)
    half[: SIZE // 2] = SCALAR
    found = {}
    for name, g in (("scalar", torch.tensor(SCALAR, dtype=torch.float64)), ("channel", half)):
        # The additive rule: a delta write of nothing would erase what its key holds.
        state = states(writes, "additive", g)[1:]
        found[f"{name}, first key"] = share(state, first.key, first.value).tolist()
        found[f"{name}, second key"] = share(state, second.key, second.value).tolist()
    return found


def draw(path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.9), layout="constrained")
    panels = figure.subplots(1, 4)
    colours = {"additive": "C1", "delta": "C0", "scalar": "C2", "channel": "C3"}

    def curve(axes: Any, x: Any, name: str, y: list[float]) -> None:
        """The first of two that are compared is broad, so that the other shows on it."""
        kind, broad = name.split(",")[0], name.startswith(("additive", "scalar"))
        dashed = name.endswith(("old value", "other value", "first key"))
        style = {"linewidth": 4, "alpha": 0.5} if broad else {"linewidth": 1.5}
        axes.plot(x, y, label=name, color=colours[kind], linestyle="--" if dashed else "-", **style)

    for axes, title, found in (
        (panels[0], "one pair again and again", again()),
        (panels[1], "a key with a new value", replaced()),
    ):
        for name, y in found.items():
            curve(axes, range(1, len(y) + 1), name, y)
        axes.set(title=title, xlabel="write")
    for name, y in untouched().items():
        curve(panels[2], OVERLAPS, name, y)
    panels[2].set(title="after a write to another key", xlabel="cosine of the two keys")
    for name, y in forgotten().items():
        curve(panels[3], range(len(y)), name, y)
    panels[3].set(title="forgetting", xlabel="tokens since both were written")
    panels[0].set_ylabel("share of the value that is read")
    for axes in panels:
        axes.set_title(axes.get_title(), fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="x-small", handlelength=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/derivation.svg"), help="default docs/derivation.svg")
    arguments = parser.parse_args()
    if arguments.out.suffix not in (".svg", ".png", ".pdf"):
        parser.exit(2, f"error: --out is {str(arguments.out)!r}; it takes a file that ends in .svg, .png, .pdf\n")
    try:
        draw(arguments.out)
    except OSError as error:
        parser.exit(2, f"error: cannot write {arguments.out}: {error.strerror}\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
