"""A data set, a loss and two kinds of parameters of one's own, clipped gradients, and a rate that moves."""

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


class SoftmaxCrossEntropy(nn.Module):
    def forward(self, logits, label):
        powers = (logits - logits.max(1, keepdim=True).values).exp()
        chosen = (powers / powers.sum(1, keepdim=True)).log() * F.one_hot(label, logits.shape[1])
        return -chosen.sum(1).mean()


torch.manual_seed(10)
train_set, test_set = Waves(73, 0, centered), Waves(30, 1, centered)
model = nn.Sequential(nn.Linear(16, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3)).double()
decayed = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 1e-3}, {"params": plain}], lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=15)
loss_fn = SoftmaxCrossEntropy()

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=15, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=15)
for epoch in range(3):
    model.train()
    total = 0.0
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(y)
    model.eval()
    with torch.no_grad():
        tests = [F.cross_entropy(model(x), y, reduction="sum").item() for x, y in test_loader]
    print(epoch, total / len(train_set), scheduler.get_last_lr()[0], sum(tests) / len(test_set))

# In a session
with manyhands.session(clip=0.5, out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=15, scheduler=scheduler)
    for epoch in here.epochs(3):
        model.train()
        for x, y in loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            here.backward(loss)
            optimizer.step()
            scheduler.step()
        here.print(epoch, here.mean_loss(), scheduler.get_last_lr()[0], here.evaluate(model, test_set).loss)
