"""The console command `certjax`."""

import argparse
import contextlib
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, logging
from absl.flags import argparse_flags

from certjax.eval import cli_evaluation


def _doctor(args: argparse.Namespace) -> None:
    from certjax.eval import doctor

    rows = doctor.report()
    if args.json:
        print(json.dumps(dict(rows), indent=1))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _convert(args: argparse.Namespace) -> None:
    from certjax.eval.progress import Progress
    from certjax.models import convert

    with contextlib.ExitStack() as stack:

        @functools.cache
        def line(stage: str) -> Progress:
            stack.close()  # ends the line of the stage before
            return stack.enter_context(Progress(stage))

        def progress(stage: str, done: int, total: int) -> None:
            if total >= 200 or not stage.endswith("MB"):  # fewer megabytes take no time
                line(stage)(done, total)

        summary = convert(
            args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite, check=args.check, progress=progress
        )
    for message in summary.messages:
        print(f"note: {message}", file=sys.stderr)
    print(f"{summary.target}: {summary.model_type}, {summary.parameters / 1e6:.1f} M parameters in {summary.dtype}")


def _generate(args: argparse.Namespace) -> None:
    from certjax.eval import generate

    options = {name: value for name, value in vars(args).items() if name not in ("run", "chat")}
    generate.run(**options)


def _demo(args: argparse.Namespace) -> None:
    from certjax.eval import demo

    demo.run(
        args.model,
        prompt_file=args.prompt,
        context=args.context,
        new_tokens=args.tokens,
        epsilon=args.epsilon,
        delta_total=args.delta,
        replay_steps=args.replay,
        seed=args.seed,
        prefill_dir=args.prefill_dir,
    )


def _bench(args: argparse.Namespace) -> None:
    from certjax.eval import latency

    latency.run(**{name: value for name, value in vars(args).items() if name != "run"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse_flags.ArgumentParser(
        prog="certjax",
        description="Certified sparse attention for JAX on CPUs.",
        allow_abbrev=False,  # an option of a command, such as --n, is no abbreviation of absl's flags
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="print versions, ISA levels, threads, huge pages")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_doctor)

    command = commands.add_parser("convert", help="convert a GGUF or safetensors model to a checkpoint")
    command.add_argument("src", metavar="SRC", help="a GGUF file, a safetensors file or index, or a downloaded folder")
    command.add_argument("dst", metavar="DST", help="folder of the new checkpoint")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the parameters (%(default)s)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there")
    command.add_argument(
        "--check",
        metavar="FINGERPRINT",
        help="reference logits (.npz or JSON) that the checkpoint must have, or it is not kept; "
        "`python -m pydoc certjax.models.selfcheck` says what they look like",
    )
    command.set_defaults(run=_convert)

    _add_generate(commands)

    command = commands.add_parser(
        "demo", help="read a document, generate with certified attention, print what was certified"
    )
    command.add_argument("model", metavar="CHECKPOINT", help="folder made by `certjax convert`")
    command.add_argument(
        "--prompt", metavar="FILE", help="UTF-8 text to read (default: Python's own language reference)"
    )
    command.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="positions in all, read and generated (default: 8192, or what model and text have); beyond those that the "
        "model was trained for, they are scaled (YaRN)",
    )
    command.add_argument("--tokens", type=int, default=48, help="tokens to generate (%(default)s)")
    command.add_argument(
        "--epsilon", type=float, default=0.1, help="allowed error relative to the value scale M (%(default)s)"
    )
    command.add_argument(
        "--delta",
        type=float,
        default=0.01,
        help="probability that anything certified is off, over the whole generation (%(default)s)",
    )
    command.add_argument("--replay", type=int, default=16, help="steps replayed against dense attention (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    command.add_argument(
        "--prefill-dir", metavar="DIR", help="keep there what reading the text gave (large snapshots), and use it again"
    )
    command.set_defaults(run=_demo)

    command = commands.add_parser(
        "bench",
        help="time certified and dense attention and what frameworks offer",
        description="Times a decode step of one kv head: certified, own dense, frameworks' calls, memory limits. "
        "Threads cannot be set in the process: choose CPUs before it starts (taskset -c 0 certjax bench).",
    )
    command.add_argument("--full", action="store_true", help="the whole grid instead of a quick one")
    command.add_argument("--n", nargs="+", metavar="N", help="cache lengths, such as 4096, 4K, 1M")
    command.add_argument("--d", type=int, nargs="+", metavar="D", help="head dims")
    command.add_argument("--g", type=int, nargs="+", metavar="G", help="query heads a kv head")
    command.add_argument("--epsilon", type=float, nargs="+", metavar="E", help="allowed errors")
    command.add_argument("--kinds", nargs="+", metavar="KIND", help="real, diffuse, peaked")
    command.add_argument("--repeats", type=int, help="repetitions")
    command.add_argument("--checkpoint", help="folder of a model that makes real caches")
    command.add_argument("--prompt", dest="prompt_file", metavar="FILE", help="UTF-8 text that the model reads")
    command.add_argument("--cache-dir", metavar="DIR", help="folder of .npz files with real keys, values and queries")
    command.add_argument("--implementation", help="of the certified step (default: what decode_attention picks)")
    command.add_argument("--json", dest="json_file", metavar="FILE", help="write everything there")
    command.add_argument("--plot", dest="plot_file", metavar="FILE", help="draw to a .png or .svg (needs matplotlib)")
    command.set_defaults(run=_bench)

    cli_evaluation.add(commands)
    return parser


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a text, or hold a conversation, with certified attention",
        description="Continues a text, or holds a conversation. The text goes to standard output as it is made, what "
        "is to be said about it to standard error.",
        epilog="""examples:
  certjax convert model.gguf model/                  once: make a checkpoint of what you downloaded
  certjax generate model/ --text "Once upon a time"
  certjax generate model/ --prompt book.txt --max-tokens 100 --json
  cat book.txt | certjax generate model/ --prompt - --temperature 0.8 --top-p 0.95 --seed 1
  certjax generate model/ --chat                     for models that have a chat template

The first step compiles the model's program, which may take minutes. With the environment variable
JAX_COMPILATION_CACHE_DIR set to a folder, the next run finds it there.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder made by `certjax convert`")
    source = command.add_argument_group("what to continue (one of these)").add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", dest="prompt_file", metavar="FILE", help="a UTF-8 text; - for standard input")
    source.add_argument("--text", help="this text")
    source.add_argument("--chat", action="store_true", help="a conversation: each line of standard input is a turn")
    group = command.add_argument_group("attention")
    group.add_argument(
        "--attention",
        choices=("certified", "dense"),
        default="certified",
        help="of the generated tokens; the prompt is always read exactly (%(default)s)",
    )
    group.add_argument(
        "--epsilon", type=float, default=0.1, metavar="E", help="error relative to the value scale M (%(default)s)"
    )
    group.add_argument(
        "--delta",
        type=float,
        default=0.01,
        metavar="D",
        help="probability that anything certified is off (%(default)s)",
    )
    group.add_argument(
        "--delta-scope",
        choices=("call", "generation"),
        default="generation",
        help="what delta is for: one attention call (head, layer, step), or a whole answer (%(default)s)",
    )
    group = command.add_argument_group("choice of tokens")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer (%(default)s)")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most likely token each time (%(default)s)",
    )
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely tokens up to P (%(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (%(default)s)")
    command.add_argument(
        "--context", type=int, metavar="N", help="with --chat: tokens of the conversation (default: 8192 at most)"
    )
    command.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print JSON, an object an answer: text, tokens, finish_reason, certificate, timings",
    )
    command.set_defaults(run=_generate)


def _main(args: argparse.Namespace) -> int:
    logging.set_verbosity(logging.WARNING)  # libraries report their progress at INFO
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the end would fail again
        return 128 + signal.SIGPIPE
    except (
        ValueError
    ) as error:  # the caller's mistakes, in one line; anything else is a fault of ours and keeps its traceback
        print(f"certjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("certjax: interrupted", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # ε and generated text must not end the program on a Latin-1 terminal
    app.run(
        _main, argv=None if argv is None else list(argv), flags_parser=lambda words: _parser().parse_args(words[1:])
    )


if __name__ == "__main__":
    main()
