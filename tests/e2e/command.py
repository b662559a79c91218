"""The real command as a subprocess, what it left, and small data to try it on."""

import contextlib
import functools
import gc
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

import psutil
import torch
from safetensors.torch import load_file

import manyhands
from manyhands.cli.main import main
from manyhands.cluster.agents.agent import serve
from manyhands.cluster.agents.early import AGENT
from tests.fork_server import import_for_commands

NETS = Path(__file__).with_name("nets.py")
# Nothing here waits so long unless it hangs.
PATIENCE_S = 240
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
# The precision is named: networks that fail or wait at a certain pass count those of a measurement too.
QUICKLY = "--set run.report=false --set train.channels_last=false --set train.precision=fp32"
QUICK = QUICKLY.split()
# Programs of torch that start processes: the second one passes --local-rank to the script.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = ["-m", "torch.distributed.launch", "--nproc-per-node", "2"]


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


def environment(**more):
    """This process's, without what a launcher of the tests themselves may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def start(*arguments, program=("-m", "manyhands"), cwd=None, to=subprocess.PIPE, **variables):
    """Starts `python -m manyhands …`; its standard error is not to be filled beyond a pipe's size."""
    line, streams = [sys.executable, *program, *map(str, arguments)], {**PIPES, "stdout": to, "stderr": to}
    return subprocess.Popen(line, cwd=cwd, env=environment(**variables), **streams)


def forked(*arguments, cwd=None, **variables):
    """Starts `manyhands …` in a fork of this process, which has imported torch already: a tenth of what a start takes.

    Its folder, environment, streams, signals and exit code are real, and its agents are forks too; that the command and
    its agents can start is for others to show.
    """
    import_for_commands()
    call = functools.partial(_end_with, functools.partial(main, [*map(str, arguments)]), environment(**variables))
    return subprocess.Popen(["never executed"], executable=sys.executable, preexec_fn=call, cwd=cwd, **PIPES)


class _ForkedAgents(subprocess.Popen):
    """Forks agents of this machine in place of starting them."""

    def __init__(self, args, *others, **options):
        if [*args] == [sys.executable, *AGENT]:
            import_for_commands()
            options["preexec_fn"] = functools.partial(_end_with, serve, dict(os.environ))
        super().__init__(args, *others, **options)


def _end_with(call, variables):
    """Runs a function in a fork, which ends with it.

    What the tests' own process has open leads nowhere in the fork, subprocess's pipe among it, and that of
    multiprocessing's tracker, which a test in this process may have had started. Closed, the numbers would be those of
    the fork's own files, and an object of the tests that ends there would close them once more. What earlier tests left
    is not collected in the fork: a process group's threads are not there, nor the file of a mapped tensor.
    """
    gc.freeze()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, nowhere}:
        os.dup2(nowhere, number, inheritable=False)
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    os.environ.clear()
    os.environ.update(variables)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as any Python does, and subprocess undoes
    subprocess.Popen = _ForkedAgents
    streams = (open(number, mode, 1, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    code = 1
    try:
        call()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def typed(**more):
    """The environment of a terminal: this Python's programs, `manyhands` among them, can be typed by name.

    What the tests set for themselves, so that they stay on this machine, is not there.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = environment(PATH=path, MANYHANDS_RUN__REPORT="false", **more)
    return {name: value for name, value in kept.items() if not name.endswith("SOCKET_IFNAME")}


def shell(line, cwd=None, **variables):
    """Starts a line as it is typed in a terminal."""
    return subprocess.Popen(["bash", "-c", line], cwd=cwd, env=typed(**variables), **PIPES)


def finish(process, code=None, says=()):
    """Waits for a command's end, if it hasn't ended, with this exit code and these words on standard error."""
    if not isinstance(process, Ended):
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            end(process)
            raise
        process = Ended(process.returncode, out, err)
    assert code in (None, process.code), process.err
    for text in [says] if isinstance(says, str) else says:
        assert text in process.err, process.err
    return process


def stop(process, number=signal.SIGTERM, code=75, says=()):
    """The end of a command that is sent a signal."""
    process.send_signal(number)
    return finish(process, code, says)


def inside(*arguments):
    """Runs a command to its end within this process; agents are forks of it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = 0
    forks = mock.patch("subprocess.Popen", _ForkedAgents)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), forks:
        try:
            main([*map(str, arguments)])
        except SystemExit as ended:
            code = ended.code or 0
    return Ended(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def fit(*given, **options):
    """Trains in this process as a Python program does, for an epoch; agents are forks of it."""
    with mock.patch("subprocess.Popen", _ForkedAgents):
        return manyhands.fit(*given, **{"quiet": True, "run__report": False, "out": "run", "epochs": 1, **options})


def alone(*arguments):
    """Trains within this process, as the only one of a group."""
    return inside(*arguments, *QUICK, "--init", f"file://{Path.cwd()}/meet", "--world-size", 1, "--rank", 0)


def words(given):
    """What is typed, as a list of words: text has spaces between them, lists and paths are taken as they are."""
    for each in given:
        if isinstance(each, str):
            yield from each.split()
        else:
            yield from map(str, each if isinstance(each, list | tuple) else [each])


def begin(*given, by=forked, **others):
    """Starts a command, or runs it where that is how."""
    return by(*words(given), **others)


def done(*given, by=forked, code=0, says=(), **others):
    """Runs a command to the end that is expected of it."""
    return finish(begin(*given, by=by, **others), code, says)


def refused(*given, says=(), by=inside, code=2, where=True, **others):
    """Runs a command that is refused in one screen, which has these words; gives the screen."""
    err = done(*given, by=by, code=code, says=says, **others).err
    assert_one_screen(err, where=where)
    return err


def end(process):
    """Ends a command and everything that it started, whatever state it is in."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.communicate()


@contextlib.contextmanager
def training(*given, by=forked, **others):
    """A command that is ended with the block, if it hasn't ended before; its words as for `done`."""
    process = begin(*given, by=by, **others)
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process)
        else:
            process.communicate()


def wait_until(condition, process=None, patience=PATIENCE_S):
    """Waits for a condition, and fails loudly where it doesn't come true or the process ends before it does."""
    until = time.monotonic() + patience
    while not (found := condition()):
        ended = process is not None and process.poll() is not None
        if time.monotonic() > until or ended:
            if not ended and process is not None:
                process.send_signal(signal.SIGKILL)
            raise AssertionError(f"waited in vain; {process.communicate() if process else ''}")
        time.sleep(0.05)
    return found


def has_ended(process):
    """Returns True if a process has exited, even if it is still a zombie, as orphans are in some containers."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def free_port():
    """A port of loopback that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def events(folder, kind=None, file="events.jsonl"):
    """The run's events so far."""
    path = Path(folder) / file
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return [event for event in found if kind in (None, event["kind"])]


def metrics(folder, kind="step"):
    """The run's records of steps or of evaluations so far."""
    return events(folder, kind, "metrics.jsonl")


def messages(folder, kind):
    """What the run's events of a kind say."""
    return [event["message"] for event in events(folder, kind)]


def read(*names):
    """The content of a JSON file."""
    return json.loads(Path(*names).read_text())


def processes_of(folder):
    """How many processes a run had."""
    return read(folder, "env.json")["processes"]


def marked(text):
    """Processes with a text in their folder, command line or environment: those that a run started, directly or not."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join([process.cwd(), *process.cmdline(), *process.environ().values()])
            if text in words and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def final_weights(folder):
    """The tensors of the newest checkpoint, by name."""
    return load_file(max((Path(folder) / "checkpoints").glob("step-*")) / "model.safetensors")


def assert_equal_weights(one, other):
    """To the last bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_one_screen(text, *, most=15, where=True):
    """What, where, what to do; nothing of our own machinery or torch's."""
    lines = [line for line in text.splitlines() if not re.match(r"\d{4}-\d\d-\d\dT.* (INFO|WARNING) ", line)]
    assert len(lines) <= most, text
    reported = [line for line in lines if line.startswith("manyhands: ")]
    assert reported, text
    assert not where or "\n  where: " in text, text
    assert "src/manyhands/" not in text, text
    assert "site-packages" not in text, text
