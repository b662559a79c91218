"""Digits by two layers and a negative log-likelihood."""

import manyhands
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

torch.manual_seed(1)
images = torch.randn(110, 1, 6, 6, dtype=torch.float64)
labels = (images.sum((1, 2, 3)) > 0).long() + (images[:, 0, 0, 0] > 1).long()
train_set = TensorDataset(images[:90], labels[:90])
layers = [nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3), nn.LogSoftmax(dim=1)]
model = nn.Sequential(*layers).double()
criterion = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=0.3)

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=24, shuffle=True)
for epoch in range(3):
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(target)
    print(epoch, total / len(train_set))

# In a session
with manyhands.session(out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=24)
    for epoch in here.epochs(3):
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            here.backward(loss)
            optimizer.step()
        here.print(epoch, here.mean_loss())
