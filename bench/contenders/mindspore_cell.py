"""MindSpore: data parallel on CPU by its own collectives, its own data set reader, the step compiled. For msrun."""

import mindspore
import mindspore.dataset as data
from mindspore import Tensor, communication, nn, ops
from mindspore.dataset import vision

from bench.contenders.shared import BATCH, DEVIATION, MEAN, RATE, Clock, arguments


def loader(folder, rank, size):
    data.config.set_num_parallel_workers(1)
    dataset = data.MnistDataset(f"{folder}/MNIST/raw", usage="train", shuffle=True, num_shards=size, shard_id=rank)
    steps = [vision.Rescale(1 / 255, 0.0), vision.Normalize((MEAN,), (DEVIATION,)), vision.HWC2CHW()]
    dataset = dataset.map(steps, "image").map(lambda label: label.astype("int32"), "label")
    return dataset.batch(BATCH, drop_remainder=True)


def main():
    given = arguments()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device("CPU")
    communication.init()
    rank, size = communication.get_rank(), communication.get_group_size()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=size)
    mindspore.set_seed(0)
    network = nn.SequentialCell(nn.Flatten(), nn.Dense(784, 256), nn.ReLU(), nn.Dense(256, 10))
    optimizer = nn.SGD(network.trainable_params(), learning_rate=RATE)
    step = nn.TrainOneStepCell(nn.WithLossCell(network, ops.cross_entropy), optimizer)
    step.set_train()
    clock = Clock("mindspore", given.steps)
    dataset = loader(given.data, rank, size)
    over = False
    while not over:
        for images, labels in dataset.create_tuple_iterator():
            loss = step(images, labels)
            over = clock.step()
            if over:
                break
    assert isinstance(loss, Tensor)
    loss.asnumpy()
    if rank == 0:
        clock.report()


if __name__ == "__main__":
    main()
