"""What an agent opens before it forks its workers, they have, whatever becomes of the files; else they open it."""

import multiprocessing
import shutil

import pytest

from manyhands.cluster.agents.protocol import orders_for
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.job import Job
from manyhands.core.errors import UserError
from manyhands.data.open import open_data
from manyhands.data.options import DataOptions
from manyhands.worker.entry import preload
from tests.data.sets import write_mnist


def _mnist(place):
    return write_mnist(place / "mnist").parent


def _open_ahead(options, **more):
    job = Job(data=options)
    preload(orders_for(job, "train", "nowhere", Rendezvous((2,)), **more))


def test_workers_have_what_their_agent_has_opened(tmp_path):
    options = DataOptions(name="mnist", dir=str(_mnist(tmp_path / "data")))
    _open_ahead(options)
    shutil.rmtree(options.dir)
    child = multiprocessing.get_context("fork").Process(target=open_data, args=(options,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert len(open_data(options).train) == 20
    fewer = options.model_copy(update={"train_samples": 5, "download": False})
    with pytest.raises(UserError, match="has no"):
        open_data(fewer)


def test_what_is_wrong_with_the_data_the_workers_say(tmp_path):
    options = DataOptions(name="mnist", dir=str(tmp_path), download=False)
    _open_ahead(options)
    with pytest.raises(UserError, match="has no train-images"):
        open_data(options)
    assert len(open_data(DataOptions(name="mnist", dir=str(_mnist(tmp_path)), download=False)).test) == 10


def test_a_users_own_objects_leave_the_named_data_alone(tmp_path):
    options = DataOptions(name="mnist", dir=str(_mnist(tmp_path / "data")), download=False)
    _open_ahead(options, objects="a file")
    shutil.rmtree(options.dir)
    with pytest.raises(UserError, match="has no"):
        open_data(options)
