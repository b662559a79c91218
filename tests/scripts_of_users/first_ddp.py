"""A network as a class, told its loss after each epoch."""

import manyhands
import torch
from torch import nn
from torch.utils.data import TensorDataset


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(25, 12)
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.flatten(1))))


torch.manual_seed(2)
x = torch.randn(80, 1, 5, 5, dtype=torch.float64)
train_set = TensorDataset(x, x.flatten(1)[:, :4].argmax(1))
model = TwoLayers().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
loss_fn = nn.CrossEntropyLoss()

# Plain
loader = torch.utils.data.DataLoader(train_set, batch_size=20, shuffle=True)
for epoch in range(3):
    model.train()
    losses = []
    for data, target in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, sum(losses) / len(losses))

# In a session
with manyhands.session(out="runs/own") as here:
    model, optimizer, loader = here.prepare(model, optimizer, train_set, batch=20)
    for epoch in here.epochs(3):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(data), target)
            here.backward(loss)
            optimizer.step()
        here.print(epoch, here.mean_loss())
