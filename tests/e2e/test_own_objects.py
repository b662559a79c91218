"""An optimizer, a schedule, metrics of the user's own: exact, saved, resumed, recorded with their file, or refused."""

import collections
import copy
import dataclasses
import functools
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import manyhands
from manyhands.checkpoint.read import load_checkpoint
from manyhands.checkpoint.write import save_unsharded
from manyhands.config.job import TrainOptions
from manyhands.core.errors import UserError
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines
from manyhands.train.optimize import make_schedule
from tests.e2e.command import done, inside, metrics, read
from tests.e2e.nets import tiny

pytestmark = pytest.mark.timeout(300)
DATA = tiny(50)
IMAGES, LABELS = DATA.tensors
# A batch is all of the data, so that its order doesn't matter: six updates.
OPTIONS = {"batch": 50, "epochs": 6, "quiet": True, "run__report": False, "run__log_every_s": 1e-3,
           "precision": "fp64"}  # fmt: skip


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def fit(model, out="run", **options):
    return manyhands.fit(model, DATA, DATA, out=out, **{**OPTIONS, **options})


def own_sgd(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": others}, {"params": [first], "lr": 0.2}], lr=0.1, momentum=0.9)


def two_rates(parameters):
    first, *others = parameters
    return torch.optim.RMSprop([{"params": others}, {"params": [first], "lr": 0.004}], lr=0.001, momentum=0.5)


def by_name(step, total_steps, steps_per_epoch=0):
    assert steps_per_epoch == 1
    return 1 - step / total_steps


class ByTheWeights(lr_scheduler.LRScheduler):
    """Rates that depend on more than the step: on all that the network has been so far."""

    def __init__(self, optimizer):
        self.sizes = []
        super().__init__(optimizer)

    def get_lr(self):
        self.sizes.append(float(self.optimizer.param_groups[0]["params"][0].detach().abs().mean()))
        return [rate / (1 + 10 * sum(self.sizes)) for rate in self.base_lrs]


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)


def cosine(optimizer, total_steps):
    return lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


ONE_CYCLE = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3)
# Each with the plain loop's scheduler.
OWN = {
    "an optimizer": (lambda parameters: torch.optim.NAdam(parameters, lr=0.01), "constant", None),
    "amsgrad": (lambda parameters: torch.optim.Adam(parameters, lr=0.003, amsgrad=True), "constant", None),
    "two rates": (two_rates, "constant", None),
    "fused": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True), "constant", None),
    "by the step": (own_sgd, lambda step: 0.5**step, lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "total steps": (own_sgd, by_name, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 6)),
    "cosine": (own_sgd, cosine, lambda o: cosine(o, 6)),
    "moves momentum too": (own_sgd, ONE_CYCLE, functools.partial(ONE_CYCLE, total_steps=6)),
    "more than the step": (own_sgd, ByTheWeights, ByTheWeights),
    "by the loss": (own_sgd, plateau, plateau),
}


def rates(path):
    return {line["step"]: line["learning_rate"] for line in metrics(path)}


@pytest.mark.parametrize(("optimizer", "schedule", "torchs"), OWN.values(), ids=OWN.keys())
def test_fit_makes_updates_of_a_plain_loop_shows_its_rates_and_resumes_exactly(optimizer, schedule, torchs):
    plain, whole, parted = (copy.deepcopy(network()).double() for _ in range(3))
    own = optimizer(list(plain.parameters()))
    scheduler, wanted = torchs(own) if torchs else None, {}
    for step in range(6):
        wanted[step + 1] = max(group["lr"] for group in own.param_groups)
        own.zero_grad()
        nn.functional.cross_entropy(plain(IMAGES.double()), LABELS).backward()
        own.step()
        if scheduler.__class__ is lr_scheduler.ReduceLROnPlateau:
            scheduler.step(nn.functional.cross_entropy(plain(IMAGES.double()), LABELS).item())
        elif scheduler:
            scheduler.step()
    ours = {"optimizer": optimizer, "schedule": schedule}
    shown = rates(fit(whole, "whole", **ours).path)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    assert shown == pytest.approx({step: wanted[step] for step in shown})
    assert {1, 6} <= shown.keys()
    for steps in (3, 0):
        fit(parted, "parted", checkpoint__resume="auto", max_steps=steps, **ours)
    assert "is reset" not in Path("parted/events.jsonl").read_text()
    assert all(torch.equal(parted.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())
    assert rates("parted") == {step: pytest.approx(wanted[step], rel=1e-12) for step in range(1, 7)}


class Times(nn.Module):
    """Of outputs so large that the loss scaler leaves the first update out."""

    def forward(self, x):
        return 60 * x


def fused(parameters, **options):
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True, **options)


def test_a_first_update_that_is_skipped_leaves_no_uninitialized_momentum():
    # Deterministic algorithms fill uninitialized memory with NaN.
    options = {"precision": "fp16", "deterministic": True}
    scaled = nn.Sequential(*network(), Times())
    assert fit(scaled, optimizer=fused, schedule="constant", **options).final.loss < 100
    with manyhands.session(**options) as here:
        given = nn.Sequential(*network(), Times())
        model, optimizer, batches = here.prepare(given, fused(given.parameters()), DATA, batch=50)
        for _ in here.epochs(6):
            for x, y in batches:
                optimizer.zero_grad()
                here.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
    assert all(torch.equal(one, scaled.state_dict()[name]) for name, one in given.state_dict().items())


def test_a_loss_may_be_named_as_a_job_names_it():
    Path("own.py").write_text("def loss(output, labels):\n    return output.exp().sum(1)\n")
    fit(network(), loss="own.py:loss", epochs=1)
    assert "own.py:loss" in read("run/network.json")["code"]


def test_an_evaluation_where_a_run_was_cut_within_an_epoch_moves_no_rate():
    def impatient(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=1.0)

    options = {"batch": 17, "optimizer": own_sgd, "schedule": impatient}
    fit(network(), "whole", **options)
    for steps in (4, 8, 0):
        fit(network(), "parted", checkpoint__resume="auto", max_steps=steps, **options)
    wanted, shown = rates("whole"), rates("parted")
    common = wanted.keys() & shown.keys()
    assert {1, 6, 9, 12, 15, 18} <= common  # ends of epochs are always there
    assert {step: shown[step] for step in common} == {step: wanted[step] for step in common}
    assert wanted[18] < wanted[1]


@pytest.mark.parametrize("of", [by_name, cosine])
def test_a_longer_run_has_the_rates_of_its_new_length(of):
    for epochs in (3, 6):
        fit(network(), optimizer=own_sgd, schedule=of, checkpoint__resume="auto", epochs=epochs)
    fit(network(), "whole", optimizer=own_sgd, schedule=of)
    wanted, shown = rates("whole"), rates("run")
    assert [shown[step] for step in (4, 5, 6)] == pytest.approx([wanted[step] for step in (4, 5, 6)])


def test_another_schedule_may_take_over_and_another_optimizer_starts_anew_and_that_is_said():
    again = {"optimizer": own_sgd, "checkpoint__resume": "auto"}
    fit(network(), schedule=ONE_CYCLE, max_steps=3, **again)
    fit(network(), schedule="constant", **again)
    assert "is reset" not in Path("run/events.jsonl").read_text()
    assert rates("run")[6] == 0.2
    fit(network(), epochs=7, schedule="constant", **{**again, "optimizer": two_rates})
    assert "the state of RMSprop is reset" in Path("run/events.jsonl").read_text()


def test_a_scheduler_s_state_that_nobody_saved_is_refused_with_its_checkpoint():
    """tests/train/test_scheduler_state.py tries other states."""
    options = {"epochs": 1, "checkpoint__resume": "auto", "optimizer": own_sgd, "schedule": plateau}
    fit(network(), **options)
    (path,) = Path("run/checkpoints").glob("step-*")
    good = load_checkpoint(path)
    shutil.rmtree(path)
    save_unsharded(path.parent, 1, dataclasses.replace(good, state={**good.state, "schedule": '{"last_epoch": "x"}'}))
    with pytest.raises(UserError, match="the scheduler's state in the checkpoint can't be restored") as caught:
        fit(network(), **options)
    assert caught.value.where == str(path)


def top3(outputs, labels):
    return (outputs.topk(3, 1).indices == labels[:, None]).any(1)


class Metric:
    def __init__(self, update, compute):
        self.update, self.compute = update, compute


class MacroRecall:
    def update(self, outputs, labels):
        right = labels[outputs.argmax(1) == labels]
        return torch.stack([right.bincount(minlength=10), labels.bincount(minlength=10)])

    def compute(self, sums):
        right, all_of_them = sums.view(2, 10)
        return (right / all_of_them).nan_to_num().mean()


@pytest.mark.slow
def test_metric_covers_the_full_set_in_fit_in_evaluate_and_on_the_page():
    # A share of the samples of class 9, of which there is none among eight that are made up.
    ninths = Metric(
        lambda outputs, labels: torch.stack([(outputs.argmax(1)[labels == 9] == 9).sum(), (labels == 9).sum()]),
        lambda sums: sums[0].item() / sums[1].item(),
    )
    net, own = network(), {"third": top3, "精度": MacroRecall(), "of_class_9": ninths}
    result = fit(net, metrics=own, held_out_set=DATA, epochs=1, batch=25, evaluate_batch=7, precision="fp32")
    outputs = net(IMAGES)
    recalls = [(outputs.argmax(1) == LABELS)[number == LABELS].double().mean() for number in range(10)]
    whole = {"third": top3(outputs, LABELS).double().mean(), "精度": sum(recalls) / 10, "of_class_9": recalls[9]}
    wanted = {name: pytest.approx(float(value)) for name, value in whole.items()}
    assert result.final.metrics == result.test.metrics == manyhands.evaluate(net, DATA, metrics=own).metrics == wanted
    page = result.report().read_text()
    assert all(figure in page for figure in ("best third", "best 精度", "test 精度, best weights"))


def size(outputs, _labels):
    """Grows while the network learns, so that its lowest is the first epoch's."""
    return outputs.abs().mean(1)


GROWING = {"batch": 25, "epochs": 4, "lr": 0.05, "schedule": "constant", "metrics": {"size": size},
           "precision": "fp32", "checkpoint__resume": "auto"}  # fmt: skip


def silent():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    return net


@pytest.mark.slow
def test_best_epoch_is_selected_by_the_named_metric():
    options = {**GROWING, "best": "lowest size", "held_out_set": DATA}
    result = fit(silent(), "whole", **options)
    figures = [one.metrics["size"] for one in result.evaluations]
    assert figures == sorted(figures)
    assert result.best == result.evaluations[0]
    assert result.test.step == result.best.step
    found = read(result.path, "evaluations/best.json")
    assert (found["step"], found["metrics"]) == (result.best.step, result.best.metrics)
    kept = manyhands.evaluate(manyhands.load(result).network, DATA, metrics={"size": size})
    assert kept.metrics["size"] == pytest.approx(result.best.metrics["size"], rel=1e-6)
    text = "\n".join(result_lines(read_run(result.path)))
    assert "best (lowest size)  top-1" in text
    assert "top-1 at the lowest size, epoch" in result.report().read_text()
    for epochs in (2, 4):
        parted = fit(silent(), "parted", **{**options, "epochs": epochs})
    assert (parted.best.step, parted.best.metrics) == (result.best.step, result.best.metrics)
    other = fit(silent(), "parted", **{**options, "best": "highest size", "epochs": 5})
    assert other.best.step == other.final.step == read_run(other.path).best.step


def test_it_is_the_best_in_a_loop_of_ones_own_too():
    net = silent()
    with manyhands.session(out="run", best="lowest size", metrics={"size": size}) as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.05), DATA, batch=25)
        for _ in here.epochs(3):
            for x, y in batches:
                here.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            here.evaluate(model, DATA, metrics={"third": top3})
    result = manyhands.Run(Path("run"), "finished")
    assert [record.best for record in result.evaluations] == [True, False, False]
    assert result.best.metrics.keys() == {"size", "third"}
    assert Path("run/checkpoints/step-00000002").is_dir()


FILE = """
import torch

def optimizer(parameters):
    return torch.optim.RMSprop(parameters, lr=1e-5, momentum=0.9)

def half(step, total_steps):
    return 1.0 if 2 * step < total_steps else 0.1

def make(optimizer, steps_per_epoch):
    return torch.optim.lr_scheduler.StepLR(optimizer, steps_per_epoch)

def top3(outputs, labels):
    return (outputs.topk(3, 1).indices == labels[:, None]).any(1)

def plain_loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

RATE = 0.1
"""
JOB = """
data = "synthetic:205x1x8x8x7"
model = "mlp"
[train]
optimizer = "own.py:optimizer"
schedule = "own.py:make"
metrics = ["own.py:top3", "own.py:plain_loss"]
epochs = 2
batch = 20
evaluate_batch = 3
[run]
report = false
log_every_s = 0.001
"""


@pytest.mark.slow
def test_a_job_names_files_of_the_users_and_resumes_on_another_number_and_every_command_shows_the_figures():
    Path("own.py").write_text(FILE)
    Path("job.toml").write_text(JOB)
    alone, ended = (done("train job.toml --json --out", how) for how in ("one -n 1", "two -n 2 --parallel fsdp"))
    final = manyhands.Run(Path("two"), "finished").final
    assert final.loss == pytest.approx(json.loads(alone.out)["final_metrics"]["plain_loss"], rel=1e-5)
    assert final.metrics["plain_loss"] == pytest.approx(final.loss, rel=1e-6)
    assert final.top1 < final.metrics["top3"] < final.top5
    assert json.loads(ended.out)["final_metrics"] == final.metrics
    assert f"top3={final.metrics['top3']:.3f}" in ended.err
    named = {f"own.py:{name}" for name in ("optimizer", "make", "top3", "plain_loss")}
    assert named <= read("two/network.json")["code"].keys()
    Path("own.py").write_text(FILE.replace("topk(3", "topk(2"))
    again = json.loads(done("eval two --which last --json", says=("own.py, as", "CHANGED since training")).out)[
        "metrics"
    ]
    assert again["top3"] < final.metrics["top3"]
    assert again["plain_loss"] == pytest.approx(final.loss, rel=1e-6)
    done("resume two -n 1 --epochs 3", says=("own.py, as two", "CHANGED since training"))
    assert "is reset" not in Path("two/events.jsonl").read_text()
    shown = rates("two")
    assert [shown[step] for step in (1, 22, 33)] == pytest.approx([1e-5, 1e-6, 1e-7])


@pytest.mark.slow
def test_run_of_python_objects_resumes_with_named_objects_only():
    own = {"schedule": lambda step: 0.5, "metrics": {"third": top3}}
    result = manyhands.fit("mlp", "synthetic:60x1x8x8x10", out="run", **{**OPTIONS, "epochs": 1, **own})
    done("resume run --epochs 2", code=2, says="was a Python object, which is not available here")
    Path("own.py").write_text(FILE)
    done("eval run", says="skipping the metric third, which was a Python object")
    done("resume run --epochs 2 --set train.schedule=own.py:half --set", 'train.metrics=["own.py:top3"]')
    assert manyhands.Run(result.path, "finished").final.metrics.keys() == {"top3"}


RECALL = MacroRecall()


def test_what_a_metric_writes_into_its_inputs_is_not_for_the_next():
    def spoils(outputs, labels):
        right = outputs.argmax(1) == labels
        outputs.zero_()
        labels.fill_(1)
        return right

    net = network()
    alone = manyhands.evaluate(net, DATA, metrics={"third": top3})
    beside = manyhands.evaluate(net, DATA, metrics={"first": spoils, "third": top3})
    assert beside.metrics == {"first": beside.top1, "third": alone.metrics["third"]}


class Keeps(lr_scheduler.ConstantLR):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.seen = collections.deque([1])


BASE = manyhands.Job(train=manyhands.TrainOptions(lr=0.3))
NO_OPTIMIZER = [
    (lambda parameters: 3, "returned a int"),
    ("own.py:RATE", "own.py:RATE is a float, not a function"),
    (torch.optim.LBFGS, "LBFGS needs a closure"),
    (lambda _: own_sgd(network().parameters()), "isn't a trainable parameter"),
    (functools.partial(fused, dampening=0.5), "fused SGD with dampening"),
    (lambda own: torch.optim.SGD(own[-1:], 0.1), "doesn't have the trainable parameter .*"),
    (lambda own: torch.optim.SGD(own, lr=0.0), "no usable learning rate"),
    ("sdg", 'did you mean "sgd"'),
]
NO_SCHEDULE = [
    (lr_scheduler.StepLR(own_sgd(network().parameters()), 3), "the schedule is a StepLR, not a"),
    ("cosin", 'did you mean "cosine"'),
    ("object", "this run's schedule was a Python object"),
    (lambda step, epochs: 1.0, "the schedule function has an unknown parameter: epochs"),
    (lambda step: "high", "the schedule returned a str at step 0"),
    (lambda step: float("nan") if step == 2 else 1.0, "the schedule returned nan at step 2"),
    (lambda o: lr_scheduler.StepLR(o, 3), "the schedule failed at step 0: TypeError"),
    (functools.partial(lr_scheduler.ReduceLROnPlateau, mode="max"), "monitors the loss, but has mode="),
    (Keeps, "the attribute seen of the scheduler Keeps is a deque, which can't be saved"),
    (lambda optimizer: lr_scheduler.StepLR(optimizer), "the schedule failed with this optimizer: T"),
    (lambda optimizer: lr_scheduler.StepLR(own_sgd(network().parameters()), 3), "belongs to another optimizer"),
    (lambda optimizer: 3, "the schedule function returned a int"),
]
NO_METRIC = [
    ({"mean": lambda outputs, labels: outputs.mean()}, r"the metric mean returned a tensor \[\] for 8 samples"),
    ({"number": lambda outputs, labels: 0.5}, "the metric number returned a float"),
    ({"third": lambda outputs: outputs}, "the metric third failed on outputs .*: TypeError"),
    ({"nan": lambda outputs, labels: labels / 0}, "the metric nan is inf|the metric nan is nan"),
    ({"state": Metric(lambda outputs, labels: None, lambda: 0)}, "update of the metric state returned a NoneType"),
    (
        {"widths": Metric(lambda outputs, labels: labels, torch.sum)},
        "update of the metric widths returned 7 sums, but 8 in an earlier call",
    ),
    ({"kind": MacroRecall}, "the metric kind is a class"),
    ({"top5": top3}, "the name top5 is already in use"),
    ({"a b": top3}, "'a b' is not a valid name for a metric"),
    (["own.py:top3", "own.py:top3"], "the name top3 is already in use"),
    (["top3"], "should be a list of file.py:function"),
    ({"last": Metric(RECALL.update, lambda sums: sums.no_such())}, "the metric last failed on outputs"),
    ({"last": Metric(RECALL.update, lambda sums: sums)}, "the metric last returned a Tensor"),
]
BEST = "best should be one of: highest top1, .*, lowest size"
NO_BEST = ["top1", "lowest top1", "highest loss", "highest third", ""]
REFUSED = [
    *(({"optimizer": given}, text) for given, text in NO_OPTIMIZER),
    *(({"schedule": given}, text) for given, text in NO_SCHEDULE),
    ({"optimizer": torch.optim.RMSprop, "job": BASE}, "train.lr applies to sgd and adamw"),
    ({"schedule": lr_scheduler.ReduceLROnPlateau, "evaluate_every": 0}, "the schedule needs evaluations"),
    ({"schedule": lambda step: 1.0, "warmup_epochs": 1.0}, "a schedule of your own includes its own warm-up"),
    ({"loss": "object"}, "this run's loss was a Python object"),
    ({"loss": "nil"}, 'no loss is called "nil"'),
    ({"metrics": ["object:third"]}, "this run's metric third was a Python object"),
    *(({"metrics": given, "evaluate_batch": 7}, text) for given, text in NO_METRIC),
    *(({"best": best, "metrics": {"size": size}}, f'{BEST}; found "{best}"') for best in NO_BEST),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_what_is_none_is_refused(settings, text):
    Path("own.py").write_text(FILE)
    with pytest.raises(UserError, match=text):
        fit(network(), **{"precision": "fp32", **settings})
    # A figure that can't be made of sums isn't found out by an evaluation.
    assert not ("the metric last" in text and metrics("run"))


def test_what_python_warns_of_once_is_not_said_at_every_update():
    optimizer = own_sgd(network().parameters())
    set_rates = make_schedule(optimizer, TrainOptions(), 5, lambda optimizer: lr_scheduler.StepLR(optimizer, 2))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for step in range(20):
            set_rates(step)
            optimizer.step()
            warnings.warn("the user's own", stacklevel=1)
    assert 1 <= len(shown) <= 3
    assert {str(one.message) for one in shown} == {"the user's own"}


def test_a_recipe_s_warm_up_gives_way():
    Path("own.py").write_text(FILE)
    shown = done("train folder:x --show-config --set train.schedule=own.py:half", by=inside)
    assert "warmup_epochs = 0.0" in shown.out
