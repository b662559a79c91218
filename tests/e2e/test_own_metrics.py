"""A metric of the user's own: exact, in records, on the screen and the page, recorded with its file's digest."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands
from manyhands.core.errors import UserError
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines
from tests.e2e.command import done, read

pytestmark = pytest.mark.timeout(300)
IMAGES = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(IMAGES, torch.arange(50) % 10)
QUIET = {"quiet": True, "run__report": False, "out": "run"}
OPTIONS = {"batch": 25, "epochs": 1, "evaluate_batch": 7, **QUIET}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def top3(outputs, labels):
    return (outputs.topk(3, 1).indices == labels[:, None]).any(1)


class MacroRecall:
    def update(self, outputs, labels):
        right = labels[outputs.argmax(1) == labels]
        return torch.stack([right.bincount(minlength=10), labels.bincount(minlength=10)])

    def compute(self, sums):
        right, all_of_them = sums.view(2, 10)
        return (right / all_of_them).nan_to_num().mean()


def of_the_whole_set(net):
    outputs, labels = net(IMAGES), DATA.tensors[1]
    recalls = [(outputs.argmax(1) == labels)[labels == number].double().mean() for number in range(10)]
    return {"third": top3(outputs, labels).double().mean(), "recall": sum(recalls) / 10}


@pytest.mark.slow
def test_it_is_that_of_the_whole_set_in_what_fit_and_evaluate_give_and_on_the_page():
    net, own = network(), {"third": top3, "recall": MacroRecall()}
    told = manyhands.fit(net, DATA, DATA, metrics=own, held_out_set=DATA, **OPTIONS)
    wanted = {name: pytest.approx(float(value)) for name, value in of_the_whole_set(net).items()}
    assert told.final.metrics == wanted
    assert told.test.metrics == wanted
    assert manyhands.evaluate(net, DATA, metrics=own).metrics == wanted
    page = told.report().read_text()
    for figure in ("best third", "best recall", "test recall, best weights"):
        assert figure in page


def size(outputs, _labels):
    """Grows while the network learns, so that its lowest is the first epoch's."""
    return outputs.abs().mean(1)


GROWING = {"batch": 25, "epochs": 4, "lr": 0.05, "schedule": "constant", "metrics": {"size": size}}


def silent():
    net = network()
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("best", [pytest.param("highest top1", marks=pytest.mark.slow), "lowest size", "highest size"])
def test_the_best_epoch_is_the_best_by_the_figure_that_is_named(best):
    def trained(out, **more):
        options = {**QUIET, "out": out, "checkpoint__resume": "auto", "best": best} | GROWING | more
        return manyhands.fit(silent(), DATA, DATA, held_out_set=DATA, **options)

    told, way, name = trained("whole"), *best.split()
    figures = [one.metrics.get(name, getattr(one, name, None)) for one in told.evaluations]
    wanted = figures.index((max if way == "highest" else min)(figures))
    assert name != "size" or wanted == (0 if way == "lowest" else 3)
    assert told.best == told.evaluations[wanted]
    assert told.test.step == told.best.step
    found = read(told.path, "evaluations/best.json")
    assert (found["step"], found["metrics"]) == (told.best.step, told.best.metrics)
    kept = manyhands.evaluate(manyhands.load(told).network, DATA, metrics={"size": size})
    assert kept.metrics["size"] == pytest.approx(told.best.metrics["size"], rel=1e-6)
    text = "\n".join(result_lines(read_run(told.path)))
    assert ("best (lowest size)  top-1" in text) == (best == "lowest size")
    assert (f"top-1 at the {best}, epoch" in told.report().read_text()) == (name != "top1")
    trained("parted", epochs=2)
    parted = trained("parted")
    assert (parted.best.step, parted.best.metrics) == (told.best.step, told.best.metrics)


def test_another_figure_may_decide_from_a_resume_on():
    options = {**QUIET, "checkpoint__resume": "auto"} | GROWING
    manyhands.fit(silent(), DATA, DATA, **options | {"epochs": 2, "best": "lowest size"})
    told = manyhands.fit(silent(), DATA, DATA, **options | {"best": "highest size"})
    assert told.best.step == told.final.step
    assert read_run(told.path).best.step == told.final.step


def test_it_is_the_best_in_a_loop_of_ones_own_too():
    net = silent()
    with manyhands.session(out="run", best="lowest size", metrics={"size": size}) as here:
        model, optimizer, batches = here.prepare(net, torch.optim.SGD(net.parameters(), 0.05), DATA, batch=25)
        for _ in here.epochs(3):
            for x, y in batches:
                here.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            here.evaluate(model, DATA, metrics={"third": top3})
    told = manyhands.Run(Path("run"), "finished")
    assert [record.best for record in told.evaluations] == [True, False, False]
    assert told.best.metrics.keys() == {"size", "third"}
    assert Path("run/checkpoints/step-00000002").is_dir()


@pytest.mark.parametrize(
    "best", ["top1", "lowest top1", "highest loss", "highest third", "lowest", "", "highest  top1"]
)
def test_what_does_not_say_which_is_the_best_is_refused(best):
    with pytest.raises(UserError, match=f'best should be one of: highest top1, .*, lowest size; found "{best}"'):
        manyhands.fit(network(), DATA, DATA, best=best, metrics={"size": size})
    with pytest.raises(UserError, match=f'best should be one of: .*; found "{best}"'), manyhands.session(best=best):
        pass


OWN = """
import torch


def top3(outputs, labels):
    return (outputs.topk(3, 1).indices == labels[:, None]).any(1)


def plain_loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


COUNT = 3
"""
JOB = """
data = "synthetic:205x1x8x8x7"
model = "mlp"
[train]
metrics = ["own.py:top3", "own.py:plain_loss"]
epochs = 1
batch = 20
evaluate_batch = 3
lr = 1e-6
"""


@pytest.mark.slow
def test_a_job_names_files_of_the_users_and_every_command_shows_the_figures():
    Path("own.py").write_text(OWN)
    Path("job.toml").write_text(JOB)
    ended = done("train job.toml --out two -n 2 --set run.report=false --json")
    final = manyhands.Run(Path("two"), "finished").final
    assert final.metrics["plain_loss"] == pytest.approx(final.loss, rel=1e-6)
    assert final.top1 < final.metrics["top3"] < final.top5
    assert json.loads(ended.out)["final_metrics"] == final.metrics
    assert f"top3={final.metrics['top3']:.3f}" in ended.err
    assert {"own.py:top3", "own.py:plain_loss"} <= read("two/network.json")["code"].keys()
    Path("own.py").write_text(OWN.replace("topk(3", "topk(2"))
    again = done("eval two --json")
    assert "own.py, as" in again.err
    assert "CHANGED since training" in again.err
    found = json.loads(again.out)
    assert found["metrics"]["top3"] < final.metrics["top3"]
    assert f"plain_loss {found['loss']:.3f}" in done("eval two").out


@pytest.mark.slow
def test_a_run_whose_metric_was_an_object_says_so():
    told = manyhands.fit("mlp", "synthetic:60x1x8x8x10", metrics={"third": top3}, **OPTIONS)
    refused = done("resume", told.path, "--epochs 2", code=2)
    assert "this run's metric third was a Python object" in refused.err
    shown = done("eval", told.path)
    assert "skipping the metric third, which was a Python object" in shown.err
    Path("own.py").write_text(OWN)
    done("resume", told.path, '--epochs 2 --set train.metrics=["own.py:top3"]')
    assert manyhands.Run(told.path, "finished").final.metrics.keys() == {"top3"}


class KeepsItsState:
    def update(self, outputs, labels):
        self.count = len(labels)

    def compute(self):
        return self.count


class OtherWidths:
    def update(self, outputs, labels):
        return labels

    def compute(self, sums):
        return sums.sum()


class FailsAtTheEnd(MacroRecall):
    def compute(self, sums):
        return sums.no_such()


class NoNumber(MacroRecall):
    def compute(self, sums):
        return sums


class NothingToDivideBy:
    """A share of the samples of class 9, of which there is none among eight that are made up."""

    def update(self, outputs, labels):
        return torch.stack([(outputs.argmax(1)[labels == 9] == 9).sum(), (labels == 9).sum()])

    def compute(self, sums):
        right, count = sums.tolist()
        return right / count


def test_figures_of_any_word_s_name_are_kept_and_read():
    own = {"paral·lel": top3, "精度": top3, "of_class_9": NothingToDivideBy()}
    told = manyhands.fit(network(), DATA, DATA, metrics=own, **OPTIONS)
    assert manyhands.Run(told.path, "finished").final.metrics.keys() == own.keys()


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


@pytest.mark.parametrize("metric", [FailsAtTheEnd(), NoNumber()])
def test_a_figure_that_cannot_be_made_is_refused_before_anything_is_trained(metric):
    with pytest.raises(UserError, match=r"the metric last (failed on outputs|returned a Tensor)"):
        manyhands.fit(network(), DATA, DATA, metrics={"last": metric}, **OPTIONS)
    metrics = Path("run/metrics.jsonl")
    assert not metrics.exists() or not metrics.read_text()


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"mean": lambda outputs, labels: outputs.mean()}, r"the metric mean returned a tensor \[\] for 8 samples"),
        ({"number": lambda outputs, labels: 0.5}, "the metric number returned a float"),
        ({"more": lambda outputs, labels: outputs}, r"the metric more returned a tensor \[8, 10\]"),
        ({"third": lambda outputs: outputs}, "the metric third failed on outputs .*: TypeError"),
        ({"nan": lambda outputs, labels: labels / 0}, "the metric nan is inf|the metric nan is nan"),
        ({"state": KeepsItsState()}, "update of the metric state returned a NoneType"),
        ({"widths": OtherWidths()}, "update of the metric widths returned 7 sums, but 8 in an earlier call"),
        ({"kind": MacroRecall}, "the metric kind is a class"),
        ({"three": 3}, "the metric three is a int, not a function"),
        ({"top5": top3}, "the name top5 is already in use"),
        ({"a b": top3}, "'a b' is not a valid name for a metric"),
        ({"top-3": top3}, "'top-3' is not a valid name for a metric"),
        ({3: top3}, "3 is not a valid name for a metric"),
        (["own.py:top3", "own.py:top3"], "the name top3 is already in use"),
        ("own.py:top4", "own.py has no object top4"),
        ("own.py:COUNT", "the metric COUNT is a int, not a function"),
        (["top3"], "should be a list of file.py:function"),
        (top3, "metrics is a function, not a dict"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, text):
    Path("own.py").write_text(OWN)
    with pytest.raises(UserError, match=text):
        manyhands.fit(network(), DATA, DATA, metrics=metrics, **OPTIONS)
