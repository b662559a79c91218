"""Nodes of several processes each meet by a file on a shared disk, as main.py's do with --dist-url file://…"""

import json
import os
import signal
import time

import pytest

from manyhands.report.read import read_run
from tests.e2e.command import finish, start, wait_until

# What `manyhands imagenet --multiprocessing-distributed` does where it finds two accelerators; here they are processes.
NODE = """
import sys

from manyhands.cli.imagenet import ImagenetFlags, nodes_of, rendezvous_of
from manyhands.config.load import load_job
from manyhands.core.errors import ManyhandsError
from manyhands.run.train import train

if __name__ == "__main__":
    node, url, batch, epochs = sys.argv[1:]
    values = {"data.name": "digits", "model.name": "mlp", "train.epochs": int(epochs), "train.batch": int(batch),
              "run.out": "run", "run.report": False, "cluster.device": "cpu", "data.workers": 0}
    flags = ImagenetFlags(world_size=2, rank=int(node), dist_url=url, multiprocessing_distributed=True)
    try:
        rendezvous = rendezvous_of(nodes_of(flags, {}), 2)
        sys.exit(train(load_job(values, environment={}).job, rendezvous=rendezvous).exit_code)
    except ManyhandsError as error:
        sys.exit(str(error))
"""


def begun(here, *batches, epochs=1):
    url = f"file://{here}/meet"
    return [start(n, url, batch, epochs, program=("-c", NODE)) for n, batch in enumerate(batches)]


def nodes(here, *batches):
    return [finish(by) for by in begun(here, *batches)]


@pytest.mark.slow
def test_two_nodes_of_two_processes_meet_by_a_file_and_train_as_one(here):
    ended = nodes(here, 64, 64)
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    run = read_run(here / "run")
    assert run.environment["processes"] == 4
    assert run.evaluations[-1].top1 > 0.5
    assert not (here / "meet").exists()


@pytest.mark.slow
def test_nodes_that_differ_say_in_what(here):
    for each in nodes(here, 64, 32):
        assert each.code
        assert "differ in the job (flags or job.toml): train.batch (" in each.err


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_goes_on_where_nobody_could_start_it_again(here):
    training = begun(here, 64, 64, epochs=200)
    wait_until((here / "run" / "metrics.jsonl").is_file, training[0])
    time.sleep(4)  # who hasn't been seen to train isn't ended
    stopped = json.loads((here / "run" / "env.json").read_text())["ranks"][1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(22)  # a run that starts its processes again would have ended it after 15
    os.kill(stopped, signal.SIGCONT)
    ended = [finish(each) for each in training]
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
