"""A schedule by the epoch, an evaluation after each, the best weights kept, and a file to go on from."""

import os

import manyhands
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(5)
x = torch.randn(120, 10, dtype=torch.float64)
y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
train_set, val_set = TensorDataset(x[:84], y[:84]), TensorDataset(x[84:], y[84:])
model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
criterion = nn.CrossEntropyLoss()

# Plain
train_loader = torch.utils.data.DataLoader(train_set, batch_size=16, shuffle=True)
val_loader = torch.utils.data.DataLoader(val_set, batch_size=16)
start, best = 0, 0.0
if os.path.exists("checkpoint.pth"):
    saved = torch.load("checkpoint.pth")
    start, best = saved["epoch"], saved["best"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
for epoch in range(start, 4):
    model.train()
    total = 0.0
    for images, target in train_loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(target)
    model.eval()
    with torch.no_grad():
        top1 = sum((model(images).argmax(1) == target).sum().item() for images, target in val_loader) / len(val_set)
    scheduler.step()
    print(epoch, total / len(train_set), top1)
    if top1 > best:
        best = top1
        torch.save(model.state_dict(), "best.pth")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({"epoch": epoch + 1, "best": best, **states}, "checkpoint.pth")

# In a session
with manyhands.session(norm_group="global", out="runs/own") as here:
    model, optimizer, train_loader = here.prepare(model, optimizer, train_set, batch=16, scheduler=scheduler)
    for epoch in here.epochs(4):
        model.train()
        for images, target in train_loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            here.backward(loss)
            optimizer.step()
        scheduler.step()
        here.print(epoch, here.mean_loss(), here.evaluate(model, val_set).top1)
