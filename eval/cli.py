"""The console command `certjax`."""

import argparse
import io
import json
import sys
from collections.abc import Sequence

from absl import app, logging
from absl.flags import argparse_flags


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

    with Progress("reading tensors") as progress:
        summary = convert(args.src, args.dst, dtype=args.dtype, overwrite=args.overwrite, progress=progress)
    for message in summary.messages:
        print(f"note: {message}", file=sys.stderr)
    print(f"{summary.target}: {summary.model_type}, {summary.parameters / 1e6:.1f} M parameters in {summary.dtype}")


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


def _ruler(args: argparse.Namespace) -> None:
    from certjax.eval import ruler

    ruler.run(**{name: value for name, value in vars(args).items() if name != "run" and value is not None})


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
    command.set_defaults(run=_convert)

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
        "--prefill-dir", metavar="DIR", help="keep there what reading the text gave (large files), and use it again"
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

    command = commands.add_parser("ruler", help="score certified and dense attention on the RULER tasks")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder made by `certjax convert`")
    command.add_argument("--out", required=True, metavar="DIR", help="folder of the results; what is there is kept")
    command.add_argument("--tasks", nargs="+", metavar="TASK", help="such as niah_single_1 (default: all thirteen)")
    command.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens in all (default: 4096)")
    command.add_argument("--samples", type=int, help="of each task and length (default: 10)")
    command.add_argument(
        "--setup", nargs="+", choices=("A", "B"), dest="setups",
        help="A: dense prompt; B: dense context, the question as the answer (default: both)",
    )  # fmt: skip
    command.add_argument("--attention", nargs="+", choices=("dense", "certified"), dest="attentions")
    command.add_argument("--epsilon", type=float, help="allowed error relative to the value scale M (default: 0.1)")
    command.add_argument("--delta", type=float, dest="delta_total", help="of a whole answer (default: 0.01)")
    command.add_argument("--seed", type=int, help="of everything random (default: 42)")
    command.add_argument("--policy", choices=("fresh", "compat"), help="compat: the published seeding (default: fresh)")
    command.add_argument("--no-prefix", action="store_false", dest="prefix", help="do not begin the answer")
    command.add_argument("--chat", metavar="NAME", help="chat format: chatml, llama3 or one of the template file")
    command.add_argument("--gate", type=float, help="mark cells whose dense score is below (default: 50)")
    command.add_argument("--templates", dest="template_file", metavar="FILE", help="JSON or TOML, other wording")
    command.add_argument("--words", dest="word_file", metavar="FILE", help="lists nouns, adjectives, verbs")
    command.add_argument("--essay", dest="essay_file", metavar="FILE", help="UTF-8 text, or JSON with text")
    command.add_argument("--squad", dest="squad_file", metavar="FILE", help="SQuAD dev v2.0, JSON")
    command.add_argument("--hotpot", dest="hotpot_file", metavar="FILE", help="HotpotQA dev distractor, JSON")
    command.set_defaults(run=_ruler)
    return parser


def _main(args: argparse.Namespace) -> int:
    logging.set_verbosity(logging.WARNING)  # libraries report their progress at INFO
    try:
        args.run(args)
    except (
        ValueError
    ) as error:  # the caller's mistakes, in one line; anything else is a fault of ours and keeps its traceback
        print(f"certjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("certjax: interrupted", file=sys.stderr)
        return 130
    return 0


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
