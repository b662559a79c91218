"""Loaders: worker processes and looking ahead change no batch; what copies do needs a card (tests/gpu)."""

import multiprocessing
import os
import random
import signal
import tempfile
import time
from contextlib import closing, nullcontext

import numpy
import psutil
import pytest
import torch
from PIL import Image
from tests.data.sets import picture
from torch.utils.data import Dataset, TensorDataset

from manyhands.core import machine
from manyhands.core.errors import RunError, UserError
from manyhands.data.decode import CorruptImageError
from manyhands.data.loading import open_loader, workers_per_rank
from manyhands.data.packed import PictureNames
from manyhands.data.splits import ImageFiles, ImagesInMemory, UserSamples
from manyhands.data.transforms import Pixels
from manyhands.worker.failure import describe_failure

PIXELS = Pixels(8, 3, (0.5,) * 3, (0.25,) * 3, "resized-crop-flip")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{number}.png" for number in range(12)]
    for number, path in enumerate(paths):
        picture(path, (30 - number, 20 + number), seed=number)
    return ImageFiles(PictureNames.from_strings(map(str, paths)), torch.arange(12) % 5)


class Chancy(Dataset):
    """Uses every generator that a user's transforms may use."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        chance = [torch.rand(()).item(), random.random(), numpy.random.rand(), torch.randn(()).item()]
        return torch.tensor([*chance, index], dtype=torch.float64), index % 3


REQUESTS = [[3, 1, 2], [0], [11, 3], [5, 4, 6, 7, 8]]


def requests():
    return iter([torch.tensor(request) for request in REQUESTS])


@pytest.fixture(scope="module")
def sources(files):
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 5
    plain = UserSamples(TensorDataset(images.float(), labels))
    return {"memory": ImagesInMemory(images, labels), "files": files, "plain": plain, "own": UserSamples(Chancy())}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("avoided", [True, False])
def test_samples_come_where_the_temporary_folder_is_too_long_for_sockets_or_the_run_ends(
    tmp_path, monkeypatch, avoided
):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # Made once for each process, which other tests of this one have done.
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    if not avoided:
        monkeypatch.setattr("manyhands.data.loading.create_socket_folder", lambda: None)
    said = nullcontext() if avoided else pytest.raises(RunError, match="can't send its samples: OSError: AF_UNIX path")
    with closing(open_loader(UserSamples(Chancy()), PIXELS, train=True, seed=1, workers=1)) as loader, said:
        assert [batch.samples.tolist() for batch in loader.batches(0, requests())] == REQUESTS
    assert tempfile.gettempdir() == str(long)


@pytest.mark.parametrize("kind", ["memory", "files", "plain", "own"])
def test_a_sample_is_the_same_alone_and_in_any_batch_by_workers(sources, kind):
    here, loader = (open_loader(sources[kind], PIXELS, train=True, seed=5, workers=count) for count in (0, 2))
    before = {*multiprocessing.active_children()}
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    epochs = []
    for epoch in (4, 2):
        alone = {int(batch.samples): batch for batch in loader.batches(epoch, order.split(1))}
        for one in (here, loader):
            batches = list(one.batches(epoch, requests()))
            assert [batch.samples.tolist() for batch in batches] == REQUESTS
            for batch in batches:
                parts = [alone[sample] for sample in batch.samples.tolist()]
                assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
                assert torch.equal(batch.labels, torch.cat([part.labels for part in parts]))
        epochs.append(torch.cat([batch.images for batch in batches]))
    assert torch.equal(*epochs) == (kind == "plain")
    assert ({*multiprocessing.active_children()} == before) == (kind in ("memory", "plain"))  # they need none
    loader.close()


def test_reading_here_leaves_the_generators_alone():
    found = []
    for reads in (False, True):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(1)
        if reads:
            list(open_loader(UserSamples(Chancy()), PIXELS, train=True, seed=5).batches(0, requests()))
        found.append((torch.rand(3).tolist(), random.random(), numpy.random.rand()))
    assert found[0] == found[1]


def test_a_consumer_may_stop_early(files):
    before = {*multiprocessing.active_children()}
    loader = open_loader(files, PIXELS, train=True, seed=5, workers=2)
    endless = (torch.tensor([number % 12]) for number in range(10**9))
    assert next(loader.batches(0, endless)).samples.tolist() == [0]
    assert [batch.samples.tolist() for batch in loader.batches(1, requests())] == REQUESTS
    next(loader.batches(2, requests()))
    workers = {*multiprocessing.active_children()} - before
    assert len(workers) == 2
    loader.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_picture_is_named_at_its_batch_and_the_loader_continues(files, workers, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"\xff\xd8\xff")
    source = ImageFiles(PictureNames.from_strings([*files.paths, str(bad)]), torch.arange(13))
    loader = open_loader(source, PIXELS, train=False, seed=0, workers=workers)
    served = loader.batches(0, [torch.tensor([1]), torch.tensor([2, 12]), torch.tensor([3])])
    assert next(served).samples.tolist() == [1]
    with pytest.raises(CorruptImageError) as caught:
        next(served)
    assert caught.value.where == str(bad)
    assert len(list(loader.batches(0, requests()))) == len(REQUESTS)
    loader.close()


class Given(Dataset):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        ([torch.zeros(3)], "sample 0 is a Tensor, not a pair"),
        ([(torch.zeros(3), 0.5)], "the label of sample 0 is 0.5"),
        ([("text", 1)], "sample 0 is a str"),
        ([(torch.zeros(3), 1), (torch.zeros(4), 1)], r"sample 1 is \[4\] torch.float32, but sample 0 is \[3\]"),
        ([(torch.zeros(2, 5, 5, dtype=torch.uint8), 1)], "8-bit pixels"),
    ],
)
def test_samples_that_can_t_be_used_are_named(samples, word):
    loader = open_loader(UserSamples(Given(*samples)), PIXELS, train=False, seed=0)
    with pytest.raises(UserError, match=word):
        list(loader.batches(0, [torch.arange(len(samples))]))


def test_pictures_of_any_kind_become_pixels():
    values = numpy.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    image = Image.fromarray(values)
    tensor = torch.from_numpy(values).permute(2, 0, 1)
    kinds = Given(
        (image, 0), (values, torch.tensor(1)), (tensor, numpy.int64(2)), (image.convert("RGBA"), torch.tensor([3]))
    )
    plain = Pixels(8, 3, (0.5,) * 3, (0.25,) * 3, "none")
    batch = next(open_loader(UserSamples(kinds), plain, train=True, seed=0).batches(0, [torch.arange(4)]))
    wanted = (tensor / 255 - 0.5) / 0.25
    assert batch.labels.tolist() == [0, 1, 2, 3]
    assert all(torch.allclose(found, wanted, atol=1e-6) for found in batch.images)


def test_cores_are_shared_and_a_containers_cpu_quota_limits_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    wanted = {(3, 8): 3, (0, 1): 0, (-1, 10**6): 1, (-1,): 8}
    assert {given: workers_per_rank(*given) for given in wanted} == wanted
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert workers_per_rank(-1) == 2


class Slow(Chancy):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def read_without_end(ready):
    loader = open_loader(UserSamples(Slow()), PIXELS, train=True, seed=0, workers=2)
    for number, _ in enumerate(loader.batches(0, (torch.tensor([number % 12]) for number in range(10**9)))):
        if number == 3:
            ready.set()


@pytest.mark.parametrize("signalled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_end_with_their_parent_and_not_by_a_stop_signal_to_all(signalled):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    parent = context.Process(target=read_without_end, args=(ready,))
    parent.start()
    assert ready.wait(60)
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) >= 2
    if signalled:
        for worker in workers:
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
        time.sleep(0.5)
        assert all(worker.is_running() for worker in workers)
    parent.kill()
    parent.join()
    assert not psutil.wait_procs(workers, timeout=10)[1]


class OwnError(Exception):
    """One that can't be made of a message alone, as torch tries to."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class Raising(Chancy):
    def __getitem__(self, index):
        if index == 3:
            raise OwnError("this", "that")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_users_own_data_set_raises_keeps_its_name_sample_and_line(workers):
    loader = open_loader(UserSamples(Raising()), PIXELS, train=True, seed=0, workers=workers)
    with pytest.raises(RunError, match="raised OwnError for sample 3: this and that") as raised:
        list(loader.batches(0, [torch.tensor([1, 2]), torch.tensor([3])]))
    loader.close()
    assert raised.value.where.startswith(f"{__file__}:")
    record = describe_failure(raised.value, rank=0, step=1, phase="train")
    assert 'raise OwnError("this", "that")' in record.excerpt
    assert "DataLoader worker" not in record.excerpt + record.what
    assert "_worker_loop" not in record.excerpt
