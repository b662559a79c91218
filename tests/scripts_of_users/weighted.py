"""Rare classes count for more, and samples of one class for nothing."""

import manyhands
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(6)
x = torch.randn(90, 8, dtype=torch.float64)
y = (x[:, 0] > 0.8).long() + (x[:, 1] > 1).long() + (x[:, 2] > 0).long()
train_set = TensorDataset(x, y)
weights = torch.tensor([0.5, 2.0, 4.0, 0.0], dtype=torch.float64)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
criterion = nn.CrossEntropyLoss(weight=weights, ignore_index=3)

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=18, shuffle=True)
for epoch in range(3):
    total = count = 0.0
    for inputs, target in loader:
        loss = criterion(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * weights[target].sum().item()
        count += weights[target].sum().item()
    print(epoch, total / count)

# In a session
with manyhands.session(out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=18)
    for epoch in here.epochs(3):
        for inputs, target in loader:
            loss = criterion(model(inputs), target)
            optimizer.zero_grad()
            here.backward(loss, weights[target].sum())
            optimizer.step()
        here.print(epoch, here.mean_loss())
