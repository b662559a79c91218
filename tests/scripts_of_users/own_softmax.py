"""A loss in small operators of one's own, with momentum; each update's loss is told."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class SoftmaxCrossEntropy(nn.Module):
    def forward(self, logits, label):
        powers = (logits - logits.max(1, keepdim=True).values).exp()
        chosen = (powers / powers.sum(1, keepdim=True)).log() * F.one_hot(label, logits.shape[1])
        return -chosen.sum(1).mean()


torch.manual_seed(4)
images = torch.rand(64, 3, 6, 6, dtype=torch.float64)
train_set = TensorDataset(images, images.mean((2, 3)).argmax(1))
net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3)).double()
loss_fn = SoftmaxCrossEntropy()
opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

# Plain
dataset = torch.utils.data.DataLoader(train_set, batch_size=32, shuffle=True)
for epoch in range(4):
    for step, (data, label) in enumerate(dataset):
        loss = loss_fn(net(data), label)
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(epoch, step, loss.item())

# In a session
with manyhands.session(out="runs/own") as here:
    net, opt, dataset = here.prepare(net, opt, train_set, batch=32)
    for epoch in here.epochs(4):
        for step, (data, label) in enumerate(dataset):
            loss = loss_fn(net(data), label)
            here.backward(loss)
            opt.step()
            opt.zero_grad()
            here.print(epoch, step, here.mean_loss())
