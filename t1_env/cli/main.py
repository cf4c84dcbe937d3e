"""Entry point of ``t1-env``. The commands are imported only when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from t1_env._version import __version__
from t1_env.errors import T1Error

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_EPILOG = """examples:
  t1-env doctor
  t1-env run --agent oracle seeds/hello-file
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command and prints one line for a mistake."""

    commands: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after looking whether the command exists."""
        words = sys.argv[1:] if args is None else list(args)
        word = next((word for word in words if not word.startswith("-")), "")
        if self.commands and word and word not in self.commands:
            near = difflib.get_close_matches(word, self.commands, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(self.commands)}"
            self.error(f"unknown command {word!r}: {hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``t1-env``."""
    parser = _Parser(
        prog="t1-env",
        description="Play, check and inspect the tasks of the T1 terminal environment.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"t1-env {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    commands.add_parser("doctor", help="say which sandboxes this machine can run and what to install for the others")
    reap = commands.add_parser("reap", help="remove what killed runs left behind", description=_REAP_HELP)
    reap.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    reap.add_argument("--all", action="store_true", help="list also what stays: in use, or of an owner that cannot be seen from here")
    reap.add_argument("--ssh", action="store_true", help="look also at the configured SSH server")
    _add_tasks(commands)
    play = commands.add_parser("play", help="play a task yourself", description=_PLAY_HELP)
    _add_episode_arguments(play)
    run = commands.add_parser("run", help="let a scripted agent play a task and print the reward of each step")
    run.add_argument("--agent", choices=("oracle", "noop"), default="oracle", help="the task's own solution, or nothing (default: oracle)")
    _add_episode_arguments(run)
    _add_audit(commands)
    _add_bench(commands)
    _add_images(commands)
    parser.commands = tuple(commands.choices)
    return parser


_REAP_HELP = """Remove processes, cgroups, temporary directories, containers and committed images of runs whose process is gone. What is
in use, made by something else, or made on another machine stays. Sandboxes look too when they first start; this looks everywhere."""

_PLAY_HELP = """Type a command line to run it. Lines that start with a colon drive the episode: ':submit' ends it (so does end of input),
':keys C-c' sends keystrokes, ':screen' shows the terminal, ':quit' leaves without submitting."""


def _add_tasks(commands: Any) -> None:
    tasks = commands.add_parser("tasks", help="list or check tasks")
    actions = tasks.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True, parser_class=_Parser)
    listing = actions.add_parser("list", help="list the tasks that can be played")
    listing.add_argument("pattern", nargs="?", default=None, help="only ids that match this glob, e.g. 'seeds/*'")
    check = actions.add_parser(
        "check", help="check that each task is well-formed, its solution passes every verifier and doing nothing none"
    )
    check.add_argument("ids", nargs="*", metavar="TASK", help="ids, globs or directories (default: every task)")
    check.add_argument("--jobs", type=_positive_int, default=1, metavar="N", help="how many to check at the same time (default: 1)")
    check.add_argument(
        "--instances",
        type=_positive_int,
        default=None,
        metavar="N",
        help="instances of each family and level (default: all that were named, 3 of a whole split)",
    )
    check.add_argument("--slips", action="store_true", help="play each task's slips too: every one must cost a verifier")
    check.add_argument("--sandbox", default="local", help="sandbox backend (default: local)")
    tasks.commands = tuple(actions.choices)


def _add_images(commands: Any) -> None:
    images = commands.add_parser("images", help="import root filesystems for the local sandbox, and look after cached layers")
    actions = images.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True, parser_class=_Parser)
    importing = actions.add_parser("import", help="import a directory, a tar archive of one, or an image saved by a container engine")
    importing.add_argument("source", metavar="TAR|DIR", help="what to import")
    importing.add_argument(
        "--name", default=None, metavar="NAME[:TAG]", help="what to call it (default: what the archive says, or its name)"
    )
    listing = actions.add_parser("list", help="list images")
    listing.add_argument("--layers", action="store_true", help="list cached layers instead")
    actions.add_parser("inspect", help="print all that is known of an image").add_argument("name", metavar="NAME")
    actions.add_parser("remove", help="remove images").add_argument("names", nargs="+", metavar="NAME", help="a name, or sha256:DIGEST")
    prune = actions.add_parser("prune", help="remove cached layers, least recently used first, never one in use")
    prune.add_argument("--all", action="store_true", help="remove every layer that is not in use")
    prune.add_argument("--max-mb", type=_non_negative_int, default=None, metavar="N", help="remove until no more than N MB are left")
    prune.add_argument("--unused-days", type=float, default=None, metavar="N", help="remove what was not used for N days")
    mapping = actions.add_parser("map", help="say what names after FROM stand for", description=_MAP_HELP)
    mapping.add_argument("pattern", nargs="?", default=None, metavar="PATTERN", help="glob over image names, e.g. 'python:3.*'")
    mapping.add_argument("target", nargs="?", default=None, metavar="NAME", help="an imported image, host or refuse")
    mapping.add_argument("--remove", action="store_true", help="remove the entry")
    images.commands = tuple(actions.choices)


_MAP_HELP = """Without arguments, print the map. The first pattern that matches decides; a name that none matches stands for the imported
image of that name, or else for this machine's own system directories (host). 'refuse' makes it an error instead."""


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure what sandboxes, shells and steps cost on this machine", description=_BENCH_HELP)
    bench.add_argument(
        "group", nargs="?", choices=("verify",), default=None, help="'verify': what verification costs, alone (default: everything)"
    )
    bench.add_argument(
        "--conformance", action="store_true", help="with 'verify': also compare the fast verifiers of every task with its test.sh (minutes)"
    )
    bench.add_argument(
        "--sandbox", action="append", choices=("local", "docker", "ssh"), help="backend to measure, may be repeated (default: local)"
    )
    bench.add_argument("--only", action="append", metavar="NAME", help="only benchmarks that match this name or glob, may be repeated")
    bench.add_argument("--list", action="store_true", help="print the figures and their definitions, and measure nothing")
    bench.add_argument("--quick", action="store_true", help="a tenth of the samples: a first impression")
    bench.add_argument(
        "--repeat", type=_positive_int, default=1, metavar="N", help="run everything N times and pool the samples (default: 1)"
    )
    bench.add_argument("--peers", action="store_true", help="also SWE-ReX's local deployment, in turn (python -m pip install swe-rex)")
    bench.add_argument("--fleet", type=_positive_int, default=64, metavar="N", help="sandboxes that run at the same time (default: 64)")
    bench.add_argument(
        "--task",
        default="seeds/bakery-backup",
        metavar="TASK",
        help="task whose environment is built in resets (default: seeds/bakery-backup)",
    )
    bench.add_argument("--docker-image", default=None, metavar="NAME", help="image for --sandbox docker (default: $T1_DOCKER_IMAGE)")
    bench.add_argument(
        "--ssh-loopback",
        action="store_true",
        help="for --sandbox ssh: start a throw-away OpenSSH server on this machine instead of using the configured host",
    )
    bench.add_argument("--json", default=None, metavar="FILE", help="write the report as JSON")
    bench.add_argument(
        "--out", default=None, metavar="DIR", help="write the report as JSON and Markdown, named by date, into this directory"
    )
    bench.add_argument("--strict", action="store_true", help="exit with status 1 if a target is missed")


_BENCH_HELP = """Measure this machine: a table of figures, targets, and the floors and peers they were measured with. Floors and peers
take turns with T1, so ratios hold on a busy machine; absolute figures need a quiet one. docs/benchmarks.md explains each figure."""


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser("audit", help="play attacks on the reward of tasks: nothing may be gained", description=_AUDIT_HELP)
    audit.add_argument(
        "tasks", nargs="*", metavar="TASK", help="ids, globs, directories, families or audit/NAME (default: all that is shipped)"
    )
    audit.add_argument("--attack", action="append", metavar="NAME", help="only attacks that match this id or glob, may be repeated")
    audit.add_argument("--class", action="append", dest="threat", metavar="NAME", help="only attacks of this class, may be repeated")
    audit.add_argument("--list", action="store_true", help="print the attacks with their sources, and play nothing")
    audit.add_argument("--naive", action="store_true", help="also play each attack against a naive verifier in the agent's own sandbox")
    audit.add_argument(
        "--random", type=_non_negative_int, default=20, metavar="N", help="episodes of random commands on each task (default: 20; 0: none)"
    )
    audit.add_argument("--jobs", type=_positive_int, default=1, metavar="N", help="episodes at the same time (default: 1)")
    audit.add_argument("--sandbox", default="local", metavar="NAME", help="sandbox backend (default: local)")
    audit.add_argument("--json", default=None, metavar="FILE", help="write the report as JSON")
    audit.add_argument("--markdown", default=None, metavar="FILE", help="write the report as Markdown, every cell included")


_AUDIT_HELP = """Play scripted attacks on tasks through the ordinary environment. Exits with status 1 if any was paid for a verifier, went
unnoticed where it must not, or could not be played. docs/audit.md explains classes and columns."""


def _add_episode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="id, directory or family, e.g. seeds/hello-file")
    parser.add_argument("--seed", type=_non_negative_int, default=0, metavar="N", help="seed of the reset (default: 0)")
    parser.add_argument("--sandbox", default="local", metavar="NAME", help="sandbox backend (default: local)")
    parser.add_argument("--reward", default="delta", metavar="NAME", help="delta, level, final or solved (default: delta)")
    parser.add_argument("--max-turns", type=_positive_int, default=300, metavar="N", help="steps until truncation (default: 300)")
    parser.add_argument(
        "--step-timeout", type=float, default=30.0, metavar="SECONDS", help="time limit of a command in seconds (default: 30)"
    )
    parser.add_argument("--record", default=None, metavar="DIR", help="write a transcript (JSONL) into this directory")


def _non_negative_int(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _positive_int(text: str) -> int:
    value = _non_negative_int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return value


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from t1_env.cli.doctor import doctor

        return doctor()
    if arguments.command == "reap":
        from t1_env.cli.reap import reap

        return reap(dry_run=arguments.dry_run, ssh=arguments.ssh, show_kept=arguments.all)
    if arguments.command == "images":
        return _dispatch_images(arguments)
    if arguments.command == "tasks" and arguments.action == "list":
        from t1_env.cli.tasks import list_command

        return list_command(arguments.pattern)
    if arguments.command == "tasks":
        from t1_env.cli.tasks import check_command

        return check_command(
            arguments.ids, jobs=arguments.jobs, instances=arguments.instances, sandbox=arguments.sandbox, slips=arguments.slips
        )
    if arguments.command == "audit":
        from t1_env.cli.audit import audit_command

        return audit_command(arguments)
    if arguments.command == "bench":
        from t1_env.cli.bench import bench_command

        return bench_command(arguments)
    from t1_env.cli.episodes import EpisodeOptions, play_command, run_command

    options = EpisodeOptions(
        task=arguments.task,
        seed=arguments.seed,
        sandbox=arguments.sandbox,
        reward=arguments.reward,
        max_turns=arguments.max_turns,
        step_timeout_s=arguments.step_timeout,
        record=arguments.record,
    )
    return play_command(options) if arguments.command == "play" else run_command(options, agent=arguments.agent)


def _dispatch_images(arguments: argparse.Namespace) -> int:
    from t1_env.cli import images

    if arguments.action == "import":
        return images.import_command(arguments.source, arguments.name)
    if arguments.action == "list":
        return images.list_command(layers=arguments.layers)
    if arguments.action == "inspect":
        return images.inspect_command(arguments.name)
    if arguments.action == "remove":
        return images.remove_command(arguments.names)
    if arguments.action == "prune":
        return images.prune_command(everything=arguments.all, max_mb=arguments.max_mb, unused_days=arguments.unused_days)
    return images.map_command(arguments.pattern, arguments.target, remove=arguments.remove)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``t1-env``.

    Args:
        argv: Arguments, without the program's name; default ``sys.argv[1:]``.

    Returns:
        0 if all went well, 1 if a check failed, 2 for a mistake in what was asked, 130 after Ctrl-C.
    """
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way after --help, --version and mistakes
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if arguments.command is None:
        parser.print_help()
        return EXIT_USAGE
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _dispatch(arguments)
        except T1Error as error:
            if arguments.debug:
                raise
            print(f"t1-env: error: {_one_line(error)}", file=sys.stderr)
            return EXIT_USAGE
        except KeyboardInterrupt:
            print("t1-env: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader of our output went away (`t1-env tasks list | head`); keep the interpreter from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    print(f"t1-env: warning: {' '.join(str(message).split())}", file=file or sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
