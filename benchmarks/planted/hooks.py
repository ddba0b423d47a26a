"""The engine that planted errors change: ddp, with one method for each place of an error."""

from typing import Any

from torch import nn

from accbench.engines.ddp import Engine


class Planted(Engine):
    """Count steps, and call one method for each place where an error can be planted."""

    num_steps = 0
    since_load = 0
    """Steps since a training state was loaded."""

    def run_step(self, step, model, spec, optimizer, batch):
        self.num_steps += 1
        self.since_load += 1
        return super().run_step(step, model, self.spec(spec), optimizer, self.batch(batch))

    def load_training_state(self, *args: Any) -> None:
        self.since_load = 0
        super().load_training_state(*args)

    def spec(self, spec):
        """Return the spec whose loss is trained."""
        return spec

    def batch(self, batch):
        """Return the batch to train on."""
        return batch

    def apply_gradients(self, optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.change([p for p in parameters if p.grad is not None])
        super().apply_gradients(optimizer)

    def change(self, parameters: list[nn.Parameter]) -> None:
        """Change gradients in place before the optimizer reads them."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            self.module(module)
        return super().prepare(model)

    def module(self, module: nn.Module) -> None:
        """Change one module in place before the model is wrapped."""
