"""Train a small transformer on the bytes of a page of docs: an ordinary PyTorch script."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import accbench

TEXT = Path(__file__).parents[2] / "docs" / "compare.md"
LENGTH = 64  # bytes that the model sees


class Bytes(Dataset):
    """Stretches of a text, each with the byte behind every byte."""

    def __init__(self, path):
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()

    def __len__(self):
        return 128

    def __getitem__(self, index):
        stretch = self.text[index * LENGTH : (index + 1) * LENGTH + 1]
        return {"inputs": stretch[:-1], "targets": stretch[1:]}


class Language(nn.Module):
    """Bytes (N, T) to logits (N, T, 256); the embedding is the last layer's weight, too."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, inputs):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=inputs.device)
        hidden = self.blocks(self.embed(inputs) + self.place, mask=mask, is_causal=True)
        return self.head(hidden)


def main():
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(Bytes(TEXT), batch_size=8, shuffle=True)
    run = accbench.accelerate(model, optimizer, loader)
    model, optimizer, loader = run
    for epoch in range(2):
        for step, batch in enumerate(loader):
            logits = model(batch["inputs"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
            run.backward(loss / 2)
            if step % 2 == 1:  # a step of the optimizer every two batches
                run.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}  loss {loss.item():.9g}")


if __name__ == "__main__":
    main()
