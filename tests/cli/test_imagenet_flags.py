"""imagenet main.py's flags: every one is known, has a home, and nodes are counted as there."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cli.imagenet import RECIPE, Nodes, imagenet, job_values, nodes_of, notes, rendezvous_of
from manyhands.cli.imagenet import ImagenetFlags as Flags
from manyhands.cli.main import main, make_app
from manyhands.cluster.hosts.inventory import Rendezvous
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.data.datasets.synthetic import open as open_fake
from manyhands.data.options import DataOptions
from manyhands.models.published import published_names

URL = "tcp://10.0.0.1:8090"
PLACES = [(URL, "10.0.0.1"), ("tcp://[fd00::1]:8090", "fd00::1"), ("tcp://n1:8090/", "n1")]
# Every flag of main.py in all its spellings, with a value, the field it belongs to and what is expected there, and the
# option of the job that it sets.
KNOWN = [
    ("-a resnet50 | --arch resnet50", "arch", "resnet50", "model.name", "torchvision:resnet50"),
    ("-j 2 | -j2 | --workers 2", "workers", 2, "data.machine_workers", 2),
    ("-j 0", "workers", 0, "data.workers", 0),
    ("--epochs 30", "epochs", 30, "train.epochs", 30),
    ("--start-epoch 3", "start_epoch", 3, "train.start_epoch", 3),
    ("-b 64 | --batch-size 64", "batch_size", 64, "train.batch", 64),
    ("--lr 0.2 | --learning-rate 0.2", "lr", 0.2, "train.lr", 0.2),
    ("--momentum 0.8", "momentum", 0.8, "train.momentum", 0.8),
    ("--wd 0.01 | --weight-decay 1e-2", "weight_decay", 0.01, "train.weight_decay", 0.01),
    ("-p 20 | --print-freq 20", "print_freq", 20, "run.log_steps", 20),
    ("--resume checkpoint.pth.tar", "resume", "checkpoint.pth.tar", "checkpoint.resume", "checkpoint.pth.tar"),
    ("-e | --evaluate", "evaluate", True, "", None),
    ("--pretrained", "pretrained", True, "model.pretrained", True),
    ("--world-size 3", "world_size", 3, "", None),
    ("--world-size -1", "world_size", -1, "", None),
    ("--rank 0", "rank", 0, "", None),
    ("--rank -1", "rank", -1, "", None),
    ("--dist-url env://", "dist_url", "env://", "", None),
    ("--dist-backend gloo", "dist_backend", "gloo", "cluster.backend", "gloo"),
    ("--seed 7", "seed", 7, "train.seed", 7),
    ("--gpu 1", "gpu", 1, "cluster.device", "auto:1"),
    ("--no-accel", "no_accel", True, "cluster.device", "cpu"),
    ("--multiprocessing-distributed", "multiprocessing_distributed", True, "", None),
    ("--dummy", "dummy", True, "data.name", "fake-imagenet"),
    ("some/folder", "data", "some/folder", "data.name", "some/folder"),
    ("mnist", "data", "mnist", "data.name", "./mnist"),  # a folder is never taken for a data set's name
    ("/data/imagenet", "data", "/data/imagenet", "data.name", "/data/imagenet"),
]
APP = make_app()


@pytest.mark.parametrize(("spellings", "field", "value", "key", "option"), KNOWN, ids=[words for words, *_ in KNOWN])
def test_every_flag_is_known_and_reaches_the_job(spellings, field, value, key, option):
    for words in spellings.split("|"):
        command, bound, _ = APP.parse_args(["imagenet", *words.split()], exit_on_error=False, print_error=False)
        assert command is imagenet
        found = dict(bound.arguments)
        given = vars(found.pop("flags", Flags())) | found
        assert {name: one for name, one in given.items() if one != getattr(Flags(), name)} == {field: value}
    if key:
        section, name = key.split(".")
        assert getattr(getattr(job_of(Flags(**{field: value})), section), name) == option


def test_every_field_has_a_flag():
    assert {field for _, field, *_ in KNOWN} == set(vars(Flags()))


def job_of(flags, environment=None):
    nodes = nodes_of(flags, environment or {})
    return load_job(job_values(flags, nodes), recipe=RECIPE, environment={}).job


def test_without_flags_it_is_main_py():
    job = job_of(Flags())
    train = job.train
    assert (train.epochs, train.batch, train.optimizer, train.lr, train.momentum) == (90, 256, "sgd", 0.1, 0.9)
    assert (train.nesterov, train.weight_decay, train.decay_norm_and_bias) == (False, 1e-4, True)
    assert (train.schedule, train.step_epochs, train.step_factor, train.warmup_epochs) == ("step", 30, 0.1, 0)
    assert (train.loss, train.label_smoothing, train.clip, train.drop_last) == ("cross-entropy", 0, 0, False)
    assert (train.precision, train.evaluate_every, train.start_epoch) == ("fp32", 1, 0)
    assert (job.model.name, job.model.num_classes, job.model.pretrained) == ("torchvision:resnet18", 1000, False)
    assert (job.data.name, job.data.image_size, job.data.augment) == ("./imagenet", 224, "resized-crop-flip")
    assert (job.data.mean, job.data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert job.checkpoint.pth_tar == "."
    assert job.cluster.init == ""
    assert job_of(Flags(arch="vit_b_16")).train == train
    assert job_of(Flags(gpu=2)).cluster.processes == 1


def test_the_help_names_all_networks_of_torchvision(capsys):
    models = pytest.importorskip("torchvision").models
    assert published_names() == models.list_models(module=models)
    with pytest.raises(SystemExit):
        main(["imagenet", "--help"])
    words = re.split(r"[^\w]+", capsys.readouterr().out)
    assert set(published_names()) <= set(words)


def test_made_pictures_fit_a_network_of_another_size():
    values = job_values(Flags(arch="inception_v3", dummy=True), nodes_of(Flags()))
    assert values["data.image_size"] == 299
    picture, _ = open_fake("fake-imagenet", DataOptions(image_size=299)).test.dataset[0]
    assert picture.shape == (3, 299, 299)
    assert job_values(Flags(arch="resnet18", dummy=True), nodes_of(Flags()))["data.image_size"] is None


@given(
    count=st.integers(2, 64), batch=st.integers(1, 4096), share=st.floats(0, 1), own=st.integers(1, 16),
    many=st.booleans(), place=st.sampled_from(PLACES),
)  # fmt: skip
def test_nodes_and_processes_are_counted_as_there(count, batch, share, own, many, place):
    url, address = place
    rank = min(count - 1, int(share * count))
    flags = Flags(
        world_size=count, rank=rank, dist_url=url, batch_size=batch, multiprocessing_distributed=many, no_accel=True
    )
    job = job_of(flags)
    assert job.train.batch == batch * count
    assert (job.cluster.init, job.cluster.world_size, job.cluster.rank) == (url, count, rank)
    rendezvous = rendezvous_of(nodes_of(flags, {}), own)
    assert rendezvous == Rendezvous((own,) * count, rank, address, 8090)
    # main.py's own arithmetic: the first process of a node has the rank (node) x (processes on each).
    assert sum(rendezvous.sizes[: rendezvous.machine]) == rank * own
    assert sum(rendezvous.sizes) == count * own


def test_one_node_needs_no_address_and_says_so():
    for flags in (Flags(world_size=1, rank=0, multiprocessing_distributed=True, dist_url=URL), Flags(dist_url=URL)):
        nodes = nodes_of(flags, {})
        assert nodes == Nodes(1, 0, "")
        assert "loopback" in notes(flags, nodes)[0]
        assert job_values(flags, nodes)["train.batch"] == 256
    assert notes(Flags(), Nodes()) == []


TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}


def test_the_environment_counts_processes_under_torchrun_and_nodes_by_hand():
    flags = Flags(dist_url="env://", batch_size=10, workers=3)
    assert nodes_of(flags, TORCHRUN) == Nodes(4, 3, "env://")
    job = job_of(flags, TORCHRUN)
    assert (job.train.batch, job.cluster.init, job.data.workers, job.data.machine_workers) == (40, "env://", 3, 0)
    several = Flags(dist_url="env://", multiprocessing_distributed=True)
    assert nodes_of(several, BY_HAND) == Nodes(2, 1, "tcp://[fd00::1]:29500")
    assert rendezvous_of(nodes_of(several, BY_HAND), 8) == Rendezvous((8, 8), 1, "fd00::1", 29500)
    three = Flags(dist_url="env://", world_size=3, rank=0)
    assert nodes_of(three, BY_HAND) == Nodes(3, 0, "tcp://[fd00::1]:29500")


@pytest.mark.parametrize(
    ("flags", "environment", "where", "says"),
    [
        (Flags(world_size=3, dist_url=URL), {}, "--rank", "needs --rank"),
        (Flags(rank=1), {}, "--rank", "needs --world-size"),
        (Flags(world_size=0), {}, "--world-size", "found 0"),
        (Flags(world_size=-2), {}, "--world-size", "found -2"),
        (Flags(world_size=2, rank=2, dist_url=URL), {}, "--rank", "outside 0 … 1"),
        (Flags(world_size=1, rank=1), {}, "--rank", "outside 0 … 0"),
        (Flags(world_size=2, rank=0), {}, "--dist-url", "multicast"),
        (Flags(world_size=2, rank=0, dist_url="10.0.0.1:8090"), {}, "--dist-url", "10.0.0.1:8090"),
        (Flags(world_size=2, rank=0, dist_url="tcp://10.0.0.1"), {}, "--dist-url", "not a rendezvous URL"),
        (Flags(dist_url="env://"), {}, "environment", "WORLD_SIZE"),
        (Flags(dist_url="env://"), {"WORLD_SIZE": "two", "RANK": "0"}, "environment", '"two"'),
        (Flags(dist_url="env://", world_size=2, rank=0), {}, "environment", "MASTER_ADDR and MASTER_PORT"),
        (Flags(), TORCHRUN, "--dist-url", "torchrun"),
        (Flags(dist_url="env://", multiprocessing_distributed=True), TORCHRUN, "--multiprocessing-d", "torchrun"),
        (Flags(gpu=0, multiprocessing_distributed=True), {}, "--gpu", "contradict"),
        (Flags(gpu=0, no_accel=True), {}, "--gpu", "contradict"),
        (Flags(resume="x", start_epoch=3), {}, "--resume", "contradict"),
        (Flags(resume="x", pretrained=True), {}, "--resume", "contradict"),
        (Flags(dummy=True, data="x"), {}, "--dummy", "contradict"),
        (Flags(print_freq=0), {}, "-p", "found 0"),
        (Flags(workers=-1), {}, "-j", "found -1"),
        (Flags(batch_size=0), {}, "-b", "found 0"),
        (Flags(gpu=-1), {}, "--gpu", "found -1"),
        (Flags(start_epoch=91), {}, "job", "greater than epochs 90"),
    ],
)
def test_what_cannot_be_honoured_is_refused(flags, environment, where, says):
    with pytest.raises(UserError) as caught:
        job_of(flags, environment)
    assert caught.value.where.startswith(where)
    assert says in caught.value.message
    assert caught.value.hints or where == "job"


def test_several_processes_on_each_node_meet_by_a_file_too():
    flags = Flags(world_size=2, rank=1, dist_url="file:///mnt/meet")
    assert rendezvous_of(nodes_of(flags, {}), 4) == Rendezvous((4, 4), 1, file="file:///mnt/meet")
    with pytest.raises(UserError, match="need a tcp:// or file:// URL"):
        rendezvous_of(Nodes(), 4)


@pytest.mark.parametrize("wrong", [{"train.schedule": "cosine"}, {"train.optimizer": "adamw"}])
def test_files_for_main_py_need_what_it_knows(wrong):
    with pytest.raises(UserError, match=r"main\.py") as caught:
        load_job(wrong, recipe=RECIPE, environment={})
    assert "pth_tar" in caught.value.message
    assert load_job({**wrong, "checkpoint.pth_tar": ""}, recipe=RECIPE, environment={}).job.checkpoint.pth_tar == ""
