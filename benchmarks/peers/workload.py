"""What every peer trains: models, samples, loss and optimizer, and the stamps of its steps.

A script of a peer is started with the environment variable PEER_CASE, a `Case` as JSON. Each
optimizer step of the process is stamped by a hook of torch's, the same for all peers. After the
warm-up and after each window of steps the process waits for its turn, as other peers' processes
have theirs. After the last window it writes what it measured and goes on to its end.
"""

import dataclasses
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from accbench.system.turns import Turns

NUM_CLASSES, NUM_TOKENS = 10, 512
# timm's name of an image model; the size of its images in pixels.
IMAGE_MODELS = {"resnet18": ("resnet18", 96), "vit_ti": ("vit_tiny_patch16_224", 96)}
SEQ_LEN = 128
_NUM_SAMPLES = 64  # different ones; they take turns
LR, WEIGHT_DECAY = 1e-3, 0.01


@dataclasses.dataclass(frozen=True)
class Case:
    """One process to measure; `steps` counts the first `warmup`, which have no speed."""

    model: str
    compiled: bool
    workers: int
    threads: int
    batch_size: int
    steps: int
    warmup: int
    tiny: bool
    folder: str
    """Where the ranks write what they measured, and a peer its own files."""
    started: float
    """`time.time()` when the command was started."""
    window: int
    """Steps between two turns, after the warm-up."""
    turns: str
    """The socket on which turns are given."""

    @property
    def image_size(self) -> int:
        """Height and width of images in pixels."""
        return 32 if self.tiny else IMAGE_MODELS[self.model][1]


def begin() -> Case:
    """Return the case to train, and stamp each optimizer step of this process from now on."""
    case = Case(**json.loads(os.environ["PEER_CASE"]))
    stamps: list[float] = []
    windows_s: list[float] = []
    own_turns: list[Turns] = []
    began = 0.0

    def stamp(*_: object) -> None:
        nonlocal began
        stamps.append(time.time())
        timed = len(stamps) - case.warmup
        if timed < 0 or (timed % case.window and len(stamps) != case.steps):
            return
        if timed:
            windows_s.append(stamps[-1] - began)
        if len(stamps) == case.steps:
            _write(case, stamps[0], windows_s)
        if not own_turns:  # a launcher takes no steps
            own_turns.append(Turns(case.turns))
        own_turns[0].wait()
        began = time.time()

    register_optimizer_step_post_hook(stamp)
    return case


def _write(case: Case, first_step: float, windows_s: list[float]) -> None:
    timed = case.steps - case.warmup
    found = {
        "samples_per_s": timed * case.batch_size * case.workers / sum(windows_s),
        "windows_s": windows_s,
        "first_step_s": first_step - case.started,
        "peak_bytes": _peak_bytes(),
        "threads": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
    }
    path = Path(case.folder) / f"rank{os.environ.get('RANK', '0')}.json"
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").rename(path)


def _peak_bytes() -> int:
    """Return the peak resident size of this program; getrusage would count its parent's, too."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Gpt2(nn.Module):
    """transformers' GPT-2 of tokens (N, T) to logits (N, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=NUM_TOKENS, n_positions=SEQ_LEN, n_embd=64, n_layer=2, n_head=2,
            use_cache=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, tokens_NT: torch.Tensor) -> torch.Tensor:
        """Return the logits (N, T, V)."""
        return self.gpt2(input_ids=tokens_NT).logits


def build(case: Case) -> nn.Module:
    """Build the case's model, on the host and in float32."""
    torch.manual_seed(0)
    if case.model == "gpt2_tiny":
        return Gpt2()
    import timm

    size = {} if case.model == "resnet18" else {"img_size": case.image_size}
    return timm.create_model(IMAGE_MODELS[case.model][0], num_classes=NUM_CLASSES, **size)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of images or tokens."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW, which torch recommends and every peer can be given."""
    return torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class Samples(Dataset):
    """As many (input, target) as the case takes, of a few random ones that lie in memory."""

    def __init__(self, case: Case) -> None:
        self.num_samples = case.steps * case.batch_size * case.workers
        generator = torch.Generator().manual_seed(0)
        if case.model == "gpt2_tiny":
            blocks = torch.randint(NUM_TOKENS, (_NUM_SAMPLES, SEQ_LEN + 1), generator=generator)
            self.samples = [(block[:-1], block[1:]) for block in blocks]
        else:
            shape = (_NUM_SAMPLES, 3, case.image_size, case.image_size)
            labels = torch.randint(NUM_CLASSES, (_NUM_SAMPLES,), generator=generator)
            images = torch.randn(shape, generator=generator)
            self.samples = list(zip(images, labels.tolist(), strict=True))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, "torch.Tensor | int"]:
        return self.samples[index % _NUM_SAMPLES]
