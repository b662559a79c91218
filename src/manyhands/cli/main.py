"""Entry point of the program `manyhands`: runs a command, prints errors on at most one screen, sets the exit code."""

import atexit
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

import cyclopts
from cyclopts.argument import _collection  # pyright: ignore[reportPrivateUsage]

from manyhands import __version__
from manyhands.cli.system import require_system
from manyhands.cluster.agents.early import kill_unused_agent
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ManyhandsError
from manyhands.core.terminal import TolerantStream, UnwritableError, plain_lines, show_json

HELP = """Train an image classifier on one laptop or many machines, with one command.

manyhands train                              real handwritten digits
manyhands train cifar10 resnet18 -n 2        two processes on this machine
manyhands train ./pets resnet50 --epochs 30  any folder of class folders
"""


COMMANDS = {
    "train": ("train", "Train a classifier."),
    "eval": ("evaluate", "Evaluate a run or a checkpoint on each test sample exactly once."),
    "predict": ("evaluate", "Print the most likely classes of pictures."),
    "resume": ("train", "Resume a stopped or failed run at the exact next sample, on any number of processes."),
    "report": ("runs", "Write report.html of a run again, with its pictures; the run may be active or have failed."),
    "ps": ("runs", "List active runs: machine, running time and progress."),
    "logs": ("runs", "Show the output of the processes of a run."),
    "why": ("runs", "Explain why a run ended (rank, machine, step, file, and what to do), or show its progress."),
    "stop": ("runs", "Ask an active run to save and stop, and wait for its end."),
    "profile": (
        "train",
        "Show where the processes of a run spend their time and which change would help most; or trace updates.",
    ),
    "clean": ("files", "List old copies and caches on this machine with their sizes; remove them with --yes."),
    "launch": ("train", "Train on several machines, started and monitored from here over ssh."),
    "doctor": ("doctor", "Check whether a job can train, here or on many machines; changes nothing."),
    "join": ("runs", "Add a machine to an active run."),
    "explain": ("doctor", "Show the rank, world size, master address and device of this process, and their sources."),
    "plan": (
        "plan",
        "Find the best parallel plan for a network and explain the choice; or show, verify and time a plan.",
    ),
    "pack": ("files", "Pack a folder of pictures into tar files, which train then reads in place of the pictures."),
    "checkpoint": ("files", "Inspect, merge and reshard checkpoints."),
    "imagenet": ("imagenet", "Train with the flags of main.py, the ImageNet example of PyTorch."),
    "schema": ("doctor", "Print the JSON Schema of job.toml, for editors."),
}
# The groups of commands in --help, by their first command.
GROUPS = {"train": "Training and inference", "ps": "Runs", "launch": "Several machines", "plan": "More"}

# Names of other programs for our commands.
COMMANDS_ELSEWHERE = {
    "val": "eval RUN", "validate": "eval RUN", "test": "eval RUN", "infer": "predict RUN PICTURES",
    "help": "--help", "list": "ps", "models": "train --help", "version": "--version",
}  # fmt: skip


def make_app(command: str = "") -> cyclopts.App:
    """Returns the application with all commands; the help page of `command` shows the docstring of its function."""
    # These searches of cyclopts take a third of a help page's time and find nothing, because no flag has a help text in
    # a docstring, or a group.
    private = cast(Any, _collection)
    private.extract_docstring_help = lambda _function: {}  # pyright: ignore[reportUnknownLambdaType]
    private._resolve_groups_from_callable = lambda *_function, **groups: [*groups.values()]  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]
    app = cyclopts.App(
        name="manyhands",
        help=HELP,
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,  # main handles it
        default_parameter=cyclopts.Parameter(negative=""),
    )
    group: cyclopts.Group | None = None
    for place, (name, (file, explanation)) in enumerate(COMMANDS.items()):
        group = cyclopts.Group(GROUPS[name], sort_key=place) if name in GROUPS else group
        # By path, so that the file of a command is imported only when the command runs.
        path = f"manyhands.cli.{file}:{'evaluate' if name == 'eval' else name}"
        app.command(path, name=name, help=None if name == command else explanation, group=group, sort_key=place)
    app["--help"].group = app["--version"].group = cyclopts.Group("Options", sort_key=len(COMMANDS))
    return app


def main(arguments: Sequence[str] | None = None, *, handles_ctrl_c: bool = False) -> None:
    """Runs one command and exits with its exit code. `handles_ctrl_c`: False if the caller set a SIGINT handler."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in _before_separator(given)
    try:
        if handles_ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        require_system()
        words = _options_by_path(_without_local_rank(given))
        code = make_app(*given[:1])(words, exit_on_error=False, print_error=False)
    except ManyhandsError as error:
        _print_error(error, as_json=as_json)
        code = error.exit_code
    except cyclopts.CycloptsError as error:
        meant, what = _suggestion(error, given), " ".join(str(error).split())
        page = f"manyhands {given[0]} --help" if given and given[0] in COMMANDS else "manyhands --help"
        what = what.partition(" Did you mean")[0] if meant else what
        _print_error(ManyhandsError(what, hints=(meant, page) if meant else (page,)), as_json=as_json)
        code = EXIT_USAGE
    except UnwritableError as error:
        _print_error(ManyhandsError(str(error), hints=("free disk space, or redirect the output",)), as_json=False)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        TolerantStream(sys.stderr).write("\nstopped\n")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    _exit(code if isinstance(code, int) else 0, entire_process=arguments is None)


def _exit(code: int, *, entire_process: bool) -> None:
    """Ends this process, without Python's normal exit if the entire process was started for the command.

    Python's normal exit aborts if a thread waits in torch's C++ code, and collects garbage for half a second.
    """
    if not entire_process:
        sys.exit(code)
    kill_unused_agent()
    if threading.active_count() == 1:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - as Python does at exit
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the failed write was reported
            stream.flush()
    os._exit(code)


def _before_separator(given: list[str]) -> list[str]:
    """Returns the arguments before "--", after which the arguments of a script follow."""
    return given[: given.index("--")] if "--" in given else given


def _without_local_rank(given: list[str]) -> list[str]:
    """Removes --local-rank, which torch.distributed.launch adds; LOCAL_RANK in the environment has the same value."""
    own = _before_separator(given)
    return [*(word for word in own if not re.fullmatch(r"--local[-_]rank=\d+", word)), *given[len(own) :]]


def _options_by_path(given: list[str]) -> list[str]:
    """Rewrites `--train.lr 0.1` and `--train.lr=0.1` as `--set train.lr=0.1`, so that every option has a flag."""
    own = _before_separator(given)
    rewritten: list[str] = []
    words = iter(enumerate(own))
    for position, word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or "." not in name:
            rewritten.append(word)
            continue
        if not equals:
            value = "true"  # a switch, unless a value follows
            if position + 1 < len(own) and not re.match(r"-[-a-zA-Z]", own[position + 1]):
                _, value = next(words)
        rewritten += ["--set", f"{name[2:].replace('-', '_')}={value}"]
    return [*rewritten, *given[len(own) :]]


def _suggestion(error: cyclopts.CycloptsError, given: list[str]) -> str:
    """Returns a suggestion for an unknown command or option; empty if there is none."""
    if isinstance(error, cyclopts.UnknownCommandError) and given[0] in COMMANDS_ELSEWHERE:
        return f"did you mean manyhands {COMMANDS_ELSEWHERE[given[0]]}?"
    if not isinstance(error, cyclopts.UnknownOptionError):
        return ""
    from manyhands.config.load import meant_key
    from manyhands.core.choices import most_similar_word

    known = [name for argument in error.argument_collection for name in argument.names]
    name = (error.token.keyword or error.token.value).partition("=")[0]
    key = meant_key(name.lstrip("-"))
    if key in {"data.name", "model.name"} and "--epochs" in known:
        return "write the data set and the network without flags: manyhands train digits mlp"
    flag = f"--{key.rpartition('.')[2].replace('_', '-')}"
    alike = most_similar_word(name, [each for each in known if each.startswith("--")])
    meant = flag if flag in known else f"--{key}" if key and "--set" in known else alike
    return f"did you mean {meant}?" if meant else ""


def _print_error(error: ManyhandsError, *, as_json: bool, most_lines: int = 30) -> None:
    """Prints the message, location and hints of an error, then the last lines of its notes (traceback or output)."""
    if as_json:
        content = {"error": error.message, "where": error.where, "do": list(error.hints), "exit_code": error.exit_code}
        with suppress(BrokenPipeError, UnwritableError):
            show_json(content)
    from rich.console import Console
    from rich.text import Text

    # If standard error is closed, the exit code still reports the failure.
    console = Console(file=cast(TextIO, TolerantStream(sys.stderr)), highlight=False, soft_wrap=True)
    console.print(Text(f"manyhands: {error.message}", style="bold red"))
    if error.where:
        console.print(Text(f"  where: {error.where}"))
    for number, line in enumerate(error.hints):
        console.print(Text(f"  {'do:   ' if number == 0 else '      '} {line}", style="green" if number == 0 else ""))
    for note in getattr(error, "__notes__", []):
        # The end of a traceback contains the cause; torch's and our frames come before it.
        lines = note.rstrip().splitlines()
        shortened = lines if len(lines) <= most_lines else ["…", *lines[-most_lines:]]
        console.print(Text(plain_lines("\n".join(shortened)), style="dim"))
