"""Small pictures by a residual network with BatchNorm, momentum and weight decay."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Residual(nn.Module):
    def __init__(self, width=6, classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.first(self.stem(x)))
        return self.fc(F.relu(x + self.second(self.conv(x))).mean((2, 3)))


torch.manual_seed(3)
pictures = torch.randn(100, 1, 6, 6, dtype=torch.float64)
labels = torch.bucketize(pictures.mean((1, 2, 3)), torch.tensor([-0.06, 0.06]))
train_set = TensorDataset(pictures[:70], labels[:70])
test_set = TensorDataset(pictures[70:], labels[70:])
model = Residual().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
criterion = nn.CrossEntropyLoss()

# Plain
train_loader = torch.utils.data.DataLoader(train_set, batch_size=16, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=16)


def right(model):
    model.eval()
    with torch.no_grad():
        return sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader) / len(test_set)


for epoch in range(3):
    model.train()
    total = 0.0
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
    print(epoch, total / len(train_set), right(model))

# In a session
with manyhands.session(norm_group="global", out="runs/own") as here:
    model, optimizer, train_loader = here.prepare(model, optimizer, train_set, batch=16)
    for epoch in here.epochs(3):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            here.backward(loss)
            optimizer.step()
        here.print(epoch, here.mean_loss(), here.evaluate(model, test_set).top1)
