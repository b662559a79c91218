"""A data set of one's own with a transform, RMSprop, and two kinds of parameters."""

import manyhands
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Waves(Dataset):
    def __init__(self, length, seed, transform):
        self.phase = torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.transform = transform

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, index):
        wave = torch.sin(torch.arange(16, dtype=torch.float64) / (1 + index % 3) + self.phase[index])
        return self.transform(wave), index % 3


def centered(wave):
    return (wave - wave.mean()) / wave.std()


torch.manual_seed(10)
train_set, test_set = Waves(75, 0, centered), Waves(30, 1, centered)
model = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).double()
decayed = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.RMSprop([{"params": decayed, "weight_decay": 1e-3}, {"params": plain}], lr=0.01)

# Plain
loader, test_loader = (
    torch.utils.data.DataLoader(train_set, batch_size=15, shuffle=True),
    torch.utils.data.DataLoader(test_set, batch_size=15),
)
for epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        tests = [(F.cross_entropy(model(x), y, reduction="sum").item(), len(y)) for x, y in test_loader]
    print(epoch, sum(loss for loss, _ in tests) / len(test_set))

# In a session
with manyhands.session(norm_group="global", out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=15)
    for epoch in here.epochs(3):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            here.backward(F.cross_entropy(model(x), y, label_smoothing=0.1))
            optimizer.step()
        here.print(epoch, here.evaluate(model, test_set).loss)
