"""Measure the kernels on this machine, each op against float64, a peer and the bytes it must move; and whole models, in
training and in decoding, which `python scripts/benchmark.py train --help` and `decode --help` explain.

    python scripts/benchmark.py kernels                                  on a GPU against flash-linear-attention
    python scripts/benchmark.py kernels --device cpu                     against the token-by-token reference
    python scripts/benchmark.py kernels --ops kda --shapes 8x4096x16x128 --json kda.json --markdown
    python scripts/benchmark.py kernels --ops kda --peer-processes 16 --peer-ms 12     minutes less for the peer's tuner

Errors    First each op is compared at B=2 T=500 H=2, K = V = D of the shape, with the recurrence in float64 on the same
          rounded inputs: ‖out − ref‖ / ‖ref‖ of o, the last state and every gradient, an initial state given. On a GPU
          a slice of the timed call is compared, too (backend "torch", float32). NaN is wrong. The exit status is 1 if
          an op is wrong or fails; a peer may.
Times     Medians in ms: forward alone without gradients, and forward with the gradients of all inputs. On a GPU by CUDA
          events. Ratio = peer / ours. Both get the same tensors in the same run, on the peer's fastest settings.
          cases.py says what the inputs are, and how "kda, gate and norm in kernel" differs from fla's.
Floor     ms to move what must move at the speed of a large copy, measured in the same run: forward reads q, k, v, g,
          beta (A_log, dt_bias) and writes o; backward reads those and d_o and writes dq, dk, dv, dg, dbeta (dA_log,
          ddt_bias); fwd+bwd is the sum. Each tensor counts in its own dtype, so a float32 g counts double.
Memory    extra MiB: the peak during forward and backward beyond inputs and d_o; o and the gradients are in it.
Host      µs of wall time per forward and backward at B=1 T=64, where the GPU waits for the host.
Cold      seconds of the first forward and backward in a new process with an empty Triton cache, imports not counted.
Decoding  `fused_recurrent_*`, one token of B sequences, float32 state; floor = the state read and written.
Around    softmax_attention, with decoding over a cache (attention.py), short_convolution, rms_norm, gated_rms_norm,
          add_rms_norm, swiglu and linear_cross_entropy (fused.py), if --ops names them, beside torch's own.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import NoReturn

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script finds what lies beside it, not its own package

import kernels
from kda_lm.errors import UserError
from scripts.benchmarking import attention, decode, fused, measure, models, peer_lm, train, tuning
from scripts.benchmarking.cases import NAMES, Case, Contender, Shape, cases_of, fla, make_inputs, ours
from scripts.benchmarking.run import Options, Run, UsageError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
OPS = (*NAMES.values(), attention.NAME, *fused.NAMES)
GPU_SHAPES = "8x4096x16x128,32x2048x8x64,1x32768x16x128"
CPU_SHAPES = "2x1024x4x64"
MODEL_SIZES = "12x768,24x1024"
GPU_DECODING = [Shape(256, 1, 16, 128), Shape(1, 1, 16, 128)]
CPU_DECODING = [Shape(16, 1, 4, 64), Shape(1, 1, 4, 64)]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; what is accepted is in it."""
        self.exit(2, f"error: {message}\n")


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{kernels,train,decode}")
    add_kernels(commands.add_parser("kernels", help="errors, times and memory of every op, beside a peer's"))
    add_train(commands.add_parser("train", help="tokens/s, MFU and memory of training a model of every pattern"))
    add_decode(commands.add_parser("decode", help="what a token takes of a model of every pattern, beside the floor"))
    add_cold(commands.add_parser("cold"))  # what `kernels` starts as fresh processes
    add_compile_peer(commands.add_parser("compile-peer"))
    arguments = parser.parse_args()
    run = {
        "kernels": benchmark_kernels,
        "train": benchmark_train,
        "decode": benchmark_decode,
        "cold": cold,
        "compile-peer": compile_peer,
    }[arguments.command]
    try:
        return run(arguments)
    except (UsageError, UserError) as error:
        parser.error(str(error))


def benchmark_kernels(arguments: argparse.Namespace) -> int:
    device = read_device(arguments.device)
    gpu = measure.on_gpu(device)
    shapes = arguments.shapes or read_shapes(GPU_SHAPES if gpu else CPU_SHAPES)
    decoding = (GPU_DECODING if gpu else CPU_DECODING) if arguments.decode else []
    if arguments.check_only:  # at sizes of its own
        shapes, decoding = list({shape.D: shape for shape in reversed(shapes)}.values())[::-1], decoding[:1]
    ops = [op for op in arguments.ops if op in NAMES.values()]
    peer, missing = choose_peer(arguments.peer, device) if ops else (None, None)
    if arguments.profile and not gpu:
        raise UsageError("--profile: got a CPU, accepted: a CUDA GPU")
    options = Options(
        shapes=shapes,
        decoding=decoding,
        ops=ops,
        attention=attention.NAME in arguments.ops,
        fused=[op for op in fused.NAMES if op in arguments.ops],
        dtype=read_dtype(arguments.dtype, device),
        device=device,
        backend=arguments.backend,
        peer=peer,
        beside_torch=arguments.peer != "none",
        repeats=arguments.repeats,
        seed=arguments.seed,
        check_only=arguments.check_only,
        cold=gpu if arguments.cold is None else arguments.cold,
        cold_peer=arguments.cold_peer,
        peer_ms=arguments.peer_ms,
        profile=arguments.profile,
        script=__file__,
        json=arguments.json,
    )
    run = Run(options, read_backend(arguments.backend, device))
    if missing:
        run.say(missing)
    if peer and peer.name == "fla":
        if arguments.peer_processes:
            words = ["--ops", ",".join(options.ops), "--shapes", ",".join(map(str, shapes))]
            tuning.compile_ahead(__file__, [*words, "--dtype", run.setting["dtype"]], arguments.peer_processes)
        if arguments.peer_ms:
            tuning.hasten(arguments.peer_ms)
    status = run.start()
    run.print_tables(arguments.markdown)
    return status


def benchmark_train(arguments: argparse.Namespace) -> int:
    given = dict(vars(arguments))
    markdown, peer = given.pop("markdown"), given.pop("peer")
    del given["command"]
    device = read_device(given.pop("device"))
    if "real" in arguments.data and arguments.vocab < models.BYTES:
        raise UsageError(f"--vocab: got {arguments.vocab}, accepted with real data: {models.BYTES} (bytes) or more")
    gpu, installed = measure.on_gpu(device), importlib.util.find_spec("fla") is not None
    if peer == "fla" and not (gpu and installed):
        why = "but fla is not installed" if gpu else "on a CPU"
        raise UsageError(f"--peer: got 'fla' {why}; accepted: auto, none")
    peer = "fla" if gpu and installed and peer != "none" else None
    run = train.TrainRun(train.Options(**given, device=device, peer=peer))
    status = run.start()
    run.print_tables(markdown)
    return status


def benchmark_decode(arguments: argparse.Namespace) -> int:
    given = dict(vars(arguments))
    markdown = given.pop("markdown")
    del given["command"]
    run = decode.DecodeRun(decode.Options(**given | {"device": read_device(arguments.device)}))
    status = run.start()
    run.print_tables(markdown)
    return status


def add_kernels(command: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    command.description = __doc__
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument(
        "--shapes",
        type=read_shapes,
        metavar="BxTxHxD,…",
        help=f"K = V = D; default {GPU_SHAPES} on a GPU, {CPU_SHAPES} on a CPU",
    )
    command.add_argument("--ops", type=read_all_ops, default=list(NAMES.values()), metavar="OP,…", help=", ".join(OPS))
    add_common(command)
    command.add_argument(
        "--peer",
        default="auto",
        choices=("auto", "fla", "none"),
        help="of the recurrence, auto: fla on a GPU, the reference on a CPU; none: nor torch's of the other ops",
    )
    command.add_argument(
        "--repeats",
        type=positive,
        default=5,
        help="timed runs on a CPU; on a GPU as many as take this times 20 ms (default 5)",
    )
    command.add_argument("--check-only", action="store_true", help="errors, tensor by tensor, and nothing else")
    command.add_argument("--decode", action=switch, default=True, help="time decoding, too (default)")
    command.add_argument("--cold", action=switch, help="cold start at the first shape (default on a GPU)")
    command.add_argument("--cold-peer", action="store_true", help="the peer's, too: minutes an op")
    add_peer_tuner(command)
    command.add_argument("--profile", action="store_true", help="print what each kernel takes of forward and backward")
    command.add_argument("--markdown", action="store_true", help="print the tables as Markdown as well")
    command.add_argument("--json", type=Path, metavar="FILE", help="write setting and rows there, after every row")


def add_models(command: argparse.ArgumentParser) -> None:
    """What `train` and `decode` have in common."""
    command.add_argument(
        "--sizes",
        type=read_sizes,
        default=read_sizes(MODEL_SIZES),
        metavar="LxD,…",
        help=f"layers and width; default {MODEL_SIZES}",
    )
    command.add_argument(
        "--patterns",
        type=lambda text: read_ops(text, tuple(models.PATTERNS)),
        default=list(models.PATTERNS),
        metavar="P,…",
        help=f"default {', '.join(models.PATTERNS)} (hybrid: kda, kda, kda, softmax)",
    )
    command.add_argument("--vocab", type=positive, default=32000, help="of the model; default 32000")
    command.add_argument("--head-dim", type=positive, default=64, help="channels of every head; default 64")
    command.add_argument("--device", help="cpu, cuda or cuda:N; default cuda if there is one")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--markdown", action="store_true", help="print the tables as Markdown as well")
    command.add_argument("--json", type=Path, metavar="FILE", help="write setting and rows there, after every row")
    command.add_argument(
        "overrides", nargs="*", metavar="OPTION=VALUE", help="as train.py takes them, over what the rows set"
    )


def add_train(command: argparse.ArgumentParser) -> None:
    command.description = train.__doc__
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    add_models(command)
    command.add_argument(
        "--seq-lens",
        type=read_numbers,
        default=[2048, 8192],
        metavar="T,…",
        help="tokens of a row; default 2048,8192",
    )
    command.add_argument(
        "--data",
        type=lambda text: read_ops(text, train.DATA),
        default=["random"],
        metavar="D,…",
        help="random (default), real",
    )
    command.add_argument("--tokens-per-step", type=positive, default=32768, help="default 32768")
    command.add_argument("--steps", type=positive, default=20, help="measured; default 20")
    command.add_argument("--warmup", type=positive, default=5, help="steps before them; default 5")
    command.add_argument("--compile", action="store_true", help="torch.compile our blocks")
    command.add_argument("--checkpoint-layers", action="store_true", help="run each layer again in the backward")
    command.add_argument("--cold", action="store_true", help="empty compilers' caches for every row")
    command.add_argument(
        "--peer", default="auto", choices=("auto", "fla", "none"), help="auto: fla on a GPU where it is installed"
    )
    command.add_argument("--peer-compile", action="store_true", help="torch.compile the peer's layers, too")
    command.add_argument(
        "--peer-loss",
        default=peer_lm.LOSSES[0],
        choices=peer_lm.LOSSES,
        help="over all logits (default), or fused with the head: less memory, but float32 products",
    )
    add_peer_tuner(command)
    command.add_argument("--timeout", type=positive, default=1200, metavar="S", help="seconds a row; default 1200")


def add_decode(command: argparse.ArgumentParser) -> None:
    command.description = decode.__doc__
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    add_models(command)
    command.add_argument("--batches", type=read_numbers, default=[1, 32, 256], metavar="B,…", help="default 1,32,256")
    command.add_argument(
        "--contexts",
        type=read_numbers,
        default=[1024, 8192, 32768, 131072],
        metavar="T,…",
        help="tokens before the measured ones, k for 1024; default 1k,8k,32k,128k",
    )


def add_peer_tuner(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--peer-processes", type=positive, metavar="N", help="that compile the peer's candidates beforehand"
    )
    command.add_argument(
        "--peer-ms", type=positive, metavar="MS", help="its autotuner gives each candidate (default its own, 125)"
    )


def add_cold(command: argparse.ArgumentParser) -> None:
    command.add_argument("--op", required=True, choices=tuple(NAMES.values()))
    command.add_argument("--in-kernel", action="store_true")
    command.add_argument("--shape", type=read_shape, required=True)
    command.add_argument("--contender", choices=("ours", "fla"), default="ours")
    add_common(command)


def add_compile_peer(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ops", type=read_ops, required=True)
    command.add_argument("--shapes", type=read_shapes, required=True)
    command.add_argument("--dtype", choices=tuple(DTYPES), required=True)
    command.add_argument("--part", type=int, nargs=2, required=True)


def add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of q, k, v; default bfloat16 on a GPU, float32 on a CPU"
    )
    command.add_argument("--backend", default="auto", choices=kernels.BACKENDS, help="which of our implementations")
    command.add_argument("--device", help="cpu, cuda or cuda:N; default cuda if there is one")
    command.add_argument("--seed", type=int, default=0)


def read_shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_shapes(text: str) -> list[Shape]:
    return [read_shape(part) for part in text.split(",")]


def read_sizes(text: str) -> list[models.Size]:
    try:
        return [models.Size.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_ops(text: str, accepted: tuple[str, ...] = tuple(NAMES.values())) -> list[str]:
    ops = text.split(",")
    for op in ops:
        if op not in accepted:
            raise argparse.ArgumentTypeError(f"got {op!r}, accepted: {', '.join(accepted)}")
    return ops


def read_all_ops(text: str) -> list[str]:
    return read_ops(text, OPS)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a whole number from 1 on")
    return int(text)


def read_numbers(text: str) -> list[int]:
    """Whole numbers, in units of 1024 where a k follows."""
    return [positive(part.removesuffix("k")) * (1024 if part.endswith("k") else 1) for part in text.split(",")]


def read_dtype(name: str | None, device: torch.device) -> torch.dtype:
    return DTYPES[name or ("bfloat16" if measure.on_gpu(device) else "float32")]


def read_backend(name: str, device: torch.device) -> str:
    """The implementation that `name` stands for on the device."""
    try:
        return kernels.resolve_backend(name, device)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def read_device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise UsageError(f"--device: got {name!r}, accepted: cpu, cuda, cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device: got {name!r}, but torch sees {torch.cuda.device_count()} CUDA GPUs; accepted: cpu")
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # events and memory are of the current one
    return device


def choose_peer(wanted: str, device: torch.device) -> tuple[Contender | None, str | None]:
    """The recurrence's peer, and a line to print where there is none that should be."""
    if wanted == "none":
        return None, None
    if not measure.on_gpu(device):
        if wanted == "fla":
            raise UsageError("--peer: got 'fla' on a CPU, accepted: auto, none")
        return ours("reference", name="reference"), None
    try:
        if importlib.util.find_spec("fla") is None:
            raise ModuleNotFoundError("fla is not installed")
        importlib.import_module("fla.ops")
    except Exception as error:  # whatever its import runs into
        line = str(error) if str(error) == "fla is not installed" else f"fla: {measure.one_line(error)}"
        if wanted == "fla":
            raise UsageError(f"--peer: got 'fla', but {line}; accepted: auto, none") from None
        return None, f"{line}: only our times"
    return fla(), None


def cold(arguments: argparse.Namespace) -> int:
    """Print the seconds of the first forward and backward of this process as a line of JSON."""
    device = read_device(arguments.device)
    case = Case(arguments.op, arguments.in_kernel)
    contender = fla() if arguments.contender == "fla" else ours(arguments.backend)
    call = contender.bind(case, "chunk")
    inputs = make_inputs(case, arguments.shape, read_dtype(arguments.dtype, device), device, arguments.seed)
    print(json.dumps({"seconds": measure.seconds_of_first_step(call, measure.Problem.of(inputs), device)}))
    return 0


def compile_peer(arguments: argparse.Namespace) -> int:
    """Fill Triton's cache with a part of the peer's candidates."""
    cases = cases_of(arguments.ops)
    return tuning.compile_part(fla(), cases, arguments.shapes, DTYPES[arguments.dtype], arguments.part)


if __name__ == "__main__":
    sys.exit(main())
