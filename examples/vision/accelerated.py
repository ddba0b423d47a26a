"""Train a small network to tell stripes from checks: an ordinary PyTorch script."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import accbench


class Patterns(Dataset):
    """Grey images of stripes (0) or checks (1), with noise."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        noise = torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(index))
        rows = (torch.arange(32) // (2 + index % 5) % 2).float()
        label = index // 5 % 2
        pattern = (rows[:, None] - label * rows[None, :]).abs().expand(32, 32)
        return pattern + noise, label


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip


def main():
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=16)
    loader = DataLoader(Patterns(), batch_size=32, shuffle=True, drop_last=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    run = accbench.accelerate(model, optimizer, loader)
    model, optimizer, loader = run
    for epoch in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            print(f"epoch {epoch}  loss {loss.item():.9g}")


if __name__ == "__main__":
    main()
