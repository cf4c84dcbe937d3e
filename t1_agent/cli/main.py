"""``t1-agent``: parses and calls. Torch is imported inside the handlers, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from t1_agent import __version__
from t1_env.errors import ConfigError, DependencyMissing, T1Error

_EPILOG = """examples:
  t1-agent train @quickstart                           train, evaluate and report; at most 20 minutes on 2 cores
  t1-agent train @quickstart --seed 1 --name second    any configuration key is a flag
  t1-agent train @quickstart --resume                  go on where a run was stopped
  t1-agent report runs/quickstart                      write the report again
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and status 2; argparse would print the whole usage first."""
        self.exit(2, f"t1-agent: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``t1-agent``."""
    parser = _Parser(
        prog="t1-agent",
        description="Train and evaluate a Mixture-of-Experts actor-critic on terminal tasks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"t1-agent {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, summary in (
        ("train", "demonstrations, warm start, PPO, evaluation and report"),
        ("warmstart", "the same road up to the warm-started actor and critic, no PPO"),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="RECIPE is @name (shipped), @path.toml, or left out; every configuration key is a flag: --ppo.iterations 5, --seed 1.",
        )
        command.add_argument("recipe", nargs="*", metavar="@RECIPE", help="recipes, later ones win")
        command.add_argument("--resume", action="store_true", help="continue the run of that name instead of refusing to touch it")
        command.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        command.add_argument("--quiet", action="store_true", help="print nothing but the path of the report")
    evaluate = commands.add_parser(
        "eval", help="evaluate a run's newest policy again", description="Evaluate a run's newest policy on its held-out tasks."
    )
    evaluate.add_argument("run", type=Path, help="directory of the run, as in runs/quickstart")
    evaluate.add_argument("--tag", default="eval", help="name of the evaluation; an existing one is never overwritten (default: eval)")
    evaluate.add_argument("--instances", type=int, help="number of held-out instances (default: as in the run)")
    compare = commands.add_parser(
        "compare",
        help="several runs of one recipe as one result",
        description="Gain of PPO over the warm start over runs that differ in their seed, with 95% intervals, as a Markdown table.",
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of finished runs")
    compare.add_argument("--json", type=Path, help="write the figures to this file too")
    report = commands.add_parser("report", help="write a run's report", description="Write runs/<name>/report/index.html.")
    report.add_argument("run", type=Path, help="directory of the run, as in runs/quickstart")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``t1-agent``.

    Args:
        argv: Arguments, default ``sys.argv[1:]``.

    Returns:
        Exit status: 0, 2 for a mistake or a machine that cannot do it (one line on standard error), 130 after Ctrl-C.
    """
    # Before torch is imported: two threads on cores shared with terminals are several times slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("train", "warmstart"):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return _dispatch(arguments, rest)
    except T1Error as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"t1-agent: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("t1-agent: stopped; add --resume to the same command to go on", file=sys.stderr)
        return 130


def _dispatch(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.command == "report":
        return _report(arguments.run)
    if arguments.command == "compare":
        return _compare(arguments.runs, arguments.json)
    if arguments.command == "eval":
        _require_agent_extra()
        from t1_agent.cli.runs import evaluate_run

        print(evaluate_run(arguments.run, tag=arguments.tag, instances=arguments.instances))
        return 0
    from t1_agent.config import load_config

    overrides = [*arguments.recipe, *rest]
    if arguments.command == "warmstart":
        overrides += ["--ppo.iterations", "0"]
    config = load_config(overrides)
    if arguments.dry_run:
        print(json.dumps(config.resolved(), indent=1))
        return 0
    _require_agent_extra()
    from t1_agent.cli.runs import train_run

    print(train_run(config, resume=arguments.resume, quiet=arguments.quiet))
    return 0


def _report(run: Path) -> int:
    _require_agent_extra()
    from t1_agent.cli.runs import require_run
    from t1_agent.eval.report import write_report

    require_run(run)
    print(write_report(run))
    return 0


def _compare(runs: Sequence[Path], json_path: Path | None) -> int:
    _require_agent_extra()
    from t1_agent.eval.seeds import as_markdown, combine_runs

    result = combine_runs(runs)
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_path}: cannot be written ({error.strerror})") from None
    print(as_markdown(result), end="")
    return 0


def _require_agent_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "tokenizers", "pyarrow", "jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise DependencyMissing(f"training needs {', '.join(missing)}: run  pip install 't1-terminal[agent]'")


if __name__ == "__main__":
    sys.exit(main())
