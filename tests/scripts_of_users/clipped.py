"""AdamW with clipped gradients, and a rate that moves with every update."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

torch.manual_seed(7)
tokens = torch.randn(72, 5, 6, dtype=torch.float64)
train_set = TensorDataset(tokens, tokens.mean((1, 2)).gt(0).long())
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Flatten(), nn.Linear(40, 2)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=24)

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=12, shuffle=True)
for epoch in range(4):
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(y)
    print(epoch, total / len(train_set), scheduler.get_last_lr()[0])

# In a session
with manyhands.session(clip=0.5, out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=12, scheduler=scheduler)
    for epoch in here.epochs(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            here.backward(loss)
            optimizer.step()
            scheduler.step()
        here.print(epoch, here.mean_loss(), scheduler.get_last_lr()[0])
