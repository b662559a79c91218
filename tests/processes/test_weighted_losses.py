"""A loss that is a weighted mean gives one gradient however the batch is shared; one that can't be shared is named."""

import functools
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.train.loss import make_loss_fn, verify_loss
from manyhands.train.trainer import process_count_dependence_reasons
from tests.processes.ranks import run_on_ranks
from tests.processes.updates import built, full_tensor, lines

WEIGHTS = torch.tensor([5.0, 0.1, 1.0, 2.0, 0.5])
LOSSES = {
    "weight": nn.CrossEntropyLoss(weight=WEIGHTS),
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "all": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
    "none": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
    "nll": nn.NLLLoss(weight=WEIGHTS, ignore_index=3),
    "partial": functools.partial(F.cross_entropy, weight=WEIGHTS),
    "own sum": lambda output, labels: F.cross_entropy(output, labels, reduction="sum"),
    "squares": lambda output, labels: F.mse_loss(output, F.one_hot(labels, 5).to(output.dtype)),
    "logits": lambda output, labels: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)(output, F.one_hot(labels, 5).float()),
}


def _network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.LogSoftmax(1))


def _bare():
    return _network()[:2]


def _train(world, loss, make=_network, **settings):
    """The gradient after an update of 13 samples, what was shown as their loss, what is said of it, and the samples."""
    flags = {
        "data.name": "synthetic:13x1x4x4x5", "train.batch": 13, "train.precision": "fp32", "train.channels_last": False,
        "model.num_classes": 5, **settings,
    }  # fmt: skip
    with built(world, make(), flags, loss=loss) as trainer:
        update = next(trainer.feed.updates(0, 0))
        trainer.updater.add_gradients(update, 0)
        gradients = [
            full_tensor(name, one.grad, trainer.network) for name, one in trainer.network.model.named_parameters()
        ]
        shown, named = trainer.updater.measured.take_sums()[0], process_count_dependence_reasons(trainer)
        warned = [event["message"] for event in lines(trainer.folder.events) if event["kind"] == "warning"]
        named += [message for message in warned if "have no test sample" not in message]
    return gradients, shown, named, [(each.inputs, each.labels) for each in update]


def _torchs_own(loss, micro_batches):
    """What torch gives for the whole batch."""
    network = _network()
    images, labels = (torch.cat(each) for each in zip(*micro_batches, strict=True))
    value = loss(network(images), labels)
    (value if value.ndim == 0 else value.mean()).backward()
    return [parameter.grad for parameter in network.parameters()]


def _small(output, labels):
    """Cross-entropy [n] in small operators, of which each can do its part of the classes."""
    powers = (output - output.max(1, keepdim=True).values).exp()
    return -((powers / powers.sum(1, keepdim=True)).log() * F.one_hot(labels, 5)).sum(1)


SMALL = [
    _small,
    lambda output, labels: _small(output, labels).sum(),
    lambda output, labels: _small(output, labels).mean(),
]
SEMI, LOCAL = {"parallel.mode": "semi", "parallel.pin": ["1=o@dp"]}, {"sync.method": "local"}
# By number of processes, the ways in which all losses are tried.
WAYS = {2: [{"parallel.mode": "fsdp"}, SEMI], 3: [{}, {"train.micro_batch": 2}]}


def _all(world):
    """Under each way each loss; losses in small operators whose classes are cut; and local steps."""
    found = [[_train(world, loss, **way) for loss in LOSSES.values()] for way in WAYS[world.size]]
    cut = {**SEMI, "parallel.pin": ["1=o@dp", "loss=o@dp"]}
    if world.size == 2:
        found += [[_train(world, loss, _bare, **cut) for loss in SMALL], [_train(world, LOSSES["weight"], **LOCAL)]]
    return found


@pytest.fixture(scope="module")
def whole():
    return [_train(World(), loss) for loss in LOSSES.values()]


def test_one_process_has_torchs_own_gradient(whole):
    for loss, (gradients, _, named, micro_batches) in zip(LOSSES.values(), whole, strict=True):
        assert named == []
        torch.testing.assert_close(gradients, _torchs_own(loss, micro_batches))


def _assert_same(ways, wanted):
    """Of each rank the ways' answers for each loss."""
    for found in zip(*ways, strict=True):
        for (gradients, shown, *_), *results in zip(wanted, *found, strict=True):
            for result in results:
                torch.testing.assert_close(result[0], gradients)
            assert sum(result[1] for result in results) == pytest.approx(shown, rel=1e-4)


def test_however_a_batch_is_shared_the_gradient_is_the_same(whole):
    """Also of a sum or mean of one's own whose classes are cut; under local steps a process weighs its own samples."""
    _assert_same(run_on_ranks(_all, 3), whole)
    ranks = run_on_ranks(_all, 2)
    _assert_same([rank[:2] for rank in ranks], whole)
    _assert_same([rank[2:3] for rank in ranks], [_train(World(), loss, _bare) for loss in SMALL])
    for *_, ((gradients, _, named, micro_batches),) in ranks:
        assert "Local steps" in named[0]
        torch.testing.assert_close(gradients, _torchs_own(LOSSES["weight"], micro_batches))


def test_what_labels_count_for_adds_up_alike_however_they_are_shared():
    loss_fn = make_loss_fn(TrainOptions(), nn.CrossEntropyLoss(weight=torch.rand(5)))
    labels = torch.randint(5, (4096,))
    assert float(sum(map(loss_fn.sum_weights, labels.split(7)))) == pytest.approx(
        float(loss_fn.sum_weights(labels)), rel=1e-12
    )


NOT_SUMS = {
    "weights hidden in a function": lambda output, labels: F.cross_entropy(output, labels, weight=WEIGHTS),
    "a class left out": lambda output, labels: F.cross_entropy(output, labels, ignore_index=4),
    "contrasts": lambda output, labels: (output @ output.T).softmax(1).diagonal().mean() + 0 * labels.sum(),
    "by the sample, of the batch": lambda output, labels: (
        F.cross_entropy(output, labels, reduction="none") / F.cross_entropy(output, labels).detach()
    ),
}


@pytest.mark.parametrize("name", NOT_SUMS)
def test_a_loss_that_does_not_add_up_is_named(name):
    _, _, (named, warned), _ = _train(World(), NOT_SUMS[name])
    assert "is not the mean of its samples' losses" in named
    assert "CrossEntropyLoss(weight=…) itself" in warned


def _resolved(loss, classes=5):
    return verify_loss(make_loss_fn(TrainOptions(), loss), classes, classes, World(), torch.float32)


class Stateful(nn.Module):
    """Weighs by what it has seen, so that it must not see what is made up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output, labels):
        self.seen += len(labels)
        return F.cross_entropy(output, labels)


@pytest.mark.parametrize("classes", [2, 1000])
def test_losses_of_probabilities_and_of_many_classes_are_tried(classes):
    def of_probabilities(output, labels):
        return F.binary_cross_entropy(output, F.one_hot(labels, classes).float())

    assert _resolved(of_probabilities, classes).dependence_reason == ""
    weights = torch.ones(classes)
    weights[classes // 2] = 0.5
    weighted = _resolved(lambda output, labels: F.cross_entropy(output, labels, weight=weights), classes)
    assert "not the mean of its samples' losses" in weighted.dependence_reason


@dataclass
class Scaled:
    """Compared by its fields, so that it has no hash."""

    factor: float = 2.0

    def __call__(self, output, labels):
        return self.factor * F.cross_entropy(output, labels)


def test_a_loss_without_a_hash_is_one_too_and_trying_leaves_a_loss_and_the_generators_as_they_were():
    loss, before = Stateful(), torch.get_rng_state()
    assert _resolved(loss).dependence_reason == ""
    assert loss.seen == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert _resolved(functools.partial(Scaled())).dependence_reason == ""


def test_what_cannot_be_tried_is_named_with_its_words():
    def strict(output, labels):
        raise RuntimeError("wants the network's own outputs")

    assert "wants the network's own outputs" in _resolved(strict).dependence_reason
    locked = Stateful()
    locked.lock = threading.Lock()
    assert "cannot pickle '_thread.lock'" in _resolved(locked).dependence_reason
    reported = _resolved(
        lambda output, labels: F.cross_entropy(output * torch.rand(len(output), 1), labels)
    ).dependence_reason
    assert "different values for the same outputs" in reported


def test_a_batch_of_ignored_samples_moves_nothing():
    gradients, _, _, _ = _train(World(), nn.CrossEntropyLoss(weight=torch.zeros(5)))
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, "the loss CrossEntropyLoss is a class"),
        (lambda output, labels: 0.0, "the loss function returned a float"),
        (lambda output, labels: output[:1].sum(1), r"the loss function returned a tensor \[1\]"),
    ],
)
def test_what_is_no_loss_is_said_in_a_line(loss, words):
    with pytest.raises(UserError, match=words):
        _train(World(), loss)
