"""Forward in bfloat16, weights and updates in single precision."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(9)
x = torch.randn(96, 1, 6, 6)
train_set = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=24, shuffle=True)
for epoch in range(3):
    total = 0.0
    for images, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    print(epoch, total / len(train_set))

# In a session
with manyhands.session(precision="bf16", out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=24)
    for epoch in here.epochs(3):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            here.backward(loss)
            optimizer.step()
        here.print(epoch, here.mean_loss())
