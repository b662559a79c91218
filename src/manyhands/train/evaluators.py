"""What evaluates during a run and at its end."""

from collections.abc import Callable, Sequence

from manyhands.config.job import Job
from manyhands.core.world import World
from manyhands.data.loading import Loader
from manyhands.parallel.network import ParallelNetwork
from manyhands.train.data_setup import DataSetup
from manyhands.train.evaluate import Evaluation, Evaluator
from manyhands.train.feed import Feed
from manyhands.train.own_metrics import CustomMetric
from manyhands.train.step import Updater


def make_evaluator(
    loader: Loader,
    length: int,
    classes: int,
    job: Job,
    network: ParallelNetwork,
    world: World,
    metrics: Sequence[CustomMetric],
) -> Evaluator:
    """Evaluates a network on `length` samples that the loader serves, as the job says."""
    return Evaluator(
        loader,
        length,
        classes,
        job.train.evaluate_batch,
        world,
        log_probabilities=job.train.loss == "nll",
        network=network,
        metrics=metrics,
        views=job.train.evaluate_views,
    )


def make_tester(
    samples: DataSetup,
    classes: int,
    job: Job,
    update: Updater,
    feed: Feed,
    metrics: Sequence[CustomMetric],
) -> Callable[..., Evaluation] | None:
    """Evaluates what was held out, as `evaluate_as_shared` does; None where nothing was."""
    if samples.held_out is None or samples.splits.held_out is None:
        return None
    count = len(samples.splits.held_out)
    evaluator = make_evaluator(samples.held_out, count, classes, job, update.network, update.world, metrics)
    return evaluate_as_shared(evaluator, update, feed)


def evaluate_as_shared(evaluator: Evaluator, update: Updater, feed: Feed) -> Callable[..., Evaluation]:
    """Evaluates the network under its mode, each time by the shares that are in force then."""
    network, gradients = update.network, update.gradients
    return lambda asked=None: evaluator(network.evaluated, gradients.autocast(), asked, feed.sharing.shares)
