"""What tests of layers look at in a process of its own.

    python -m tests.distributed.apart plans|logits

What is imported for it changes the environment, or settings of torch.
"""

import sys


def plans() -> None:
    """Print the stages of a model of transformers', and the axes along which its plan cuts it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from accbench.distributed.collectives import RankGroup
    from accbench.engines.common import pipeline_stages, tensor_parallel

    net = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    print(*pipeline_stages.find_plan(net))
    plan = tensor_parallel.find_plan(net)
    slices = tensor_parallel.parallelize(net, plan, RankGroup("", 1, 2))
    print(slices["model.layers.0.self_attn.k_proj.weight"].axis)
    print(slices["model.layers.0.mlp.down_proj.weight"].axis)


def logits() -> None:
    """Print what gathered logits are, in a process group of mock."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accbench.distributed.collectives import RankGroup
    from accbench.engines.common import tensor_parallel

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6))
    plan = {"0": "colwise_gather_output"}
    tensor_parallel.parallelize(net, plan, RankGroup.of(dist.group.WORLD))
    gathered = net(torch.ones(2, 3, 4))
    print([*gathered.shape], gathered._is_view(), gathered.is_contiguous())
    dist.destroy_process_group()


if __name__ == "__main__":
    {"plans": plans, "logits": logits}[sys.argv[1]]()
