"""Four small batches for each update."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(8)
x = torch.randn(96, 1, 4, 4, dtype=torch.float64)
train_set = TensorDataset(x, (x.amax((1, 2, 3)) > 1.8).long())
model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=8, shuffle=True)
for epoch in range(4):
    total = 0.0
    for number, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        (loss / 4).backward()
        total += loss.item() * len(labels)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, total / len(train_set))

# In a session
with manyhands.session(micro_batch=8, out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=32)
    for epoch in here.epochs(4):
        for number, (images, labels) in enumerate(loader):
            loss = F.cross_entropy(model(images), labels)
            here.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        here.print(epoch, here.mean_loss())
