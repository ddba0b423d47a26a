"""transformers' Trainer, for any module whose forward pass returns its loss."""

import torch
import workload
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class WithLoss(nn.Module):
    """A network that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        logits = self.net(inputs)
        return {"loss": workload.loss(logits, targets), "logits": logits}


class Named(Dataset):
    """The samples as mappings, which Trainer collates by name."""

    def __init__(self, case: workload.Case) -> None:
        self.samples = workload.Samples(case)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, targets = self.samples[index]
        return {"inputs": inputs, "targets": torch.as_tensor(targets)}


def main() -> None:
    case = workload.begin()
    arguments = TrainingArguments(
        output_dir=case.folder, use_cpu=True, max_steps=case.steps,
        per_device_train_batch_size=case.batch_size, optim="adamw_torch_fused",
        learning_rate=workload.LR, weight_decay=workload.WEIGHT_DECAY, max_grad_norm=0.0,
        lr_scheduler_type="constant", torch_compile=case.compiled, remove_unused_columns=False,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Trainer(WithLoss(workload.build(case)), arguments, train_dataset=Named(case)).train()


if __name__ == "__main__":
    main()
