"""GPT-2 as transformers builds it, with dropout of 0.1 and tied embeddings.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from functools import partial

from torch import nn

from accbench.models.tasks.language import LanguageModel, options_of_transformers

# name -> (layers, heads, width, vocabulary size)
_SIZES = {
    "gpt2": (12, 12, 768, 50257),
    "gpt2_medium": (24, 16, 1024, 50257),
    "gpt2_tiny": (2, 2, 64, 512),
}
_POSITIONS = 1024
TENSOR_PARALLEL_PLAN = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn": "divide:split_size,num_heads",
    "transformer.h.*.attn.c_attn": "packed_colwise:3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
SEQUENCE_PARALLEL_PLAN = {
    "transformer.drop": "scatter_input",
    "transformer.h.*.ln_[12]": "sequence_parallel",
    "transformer.h.*.attn": "gather_input",
    "transformer.h.*.attn.resid_dropout": "sequence_parallel",
    "transformer.h.*.mlp": "gather_input",
    "transformer.h.*.mlp.dropout": "sequence_parallel",
    "transformer.ln_f": "gather_output",
}
PIPELINE_PLAN = [
    "transformer.wte", "transformer.wpe", "transformer.h.*", "transformer.ln_f", "lm_head"
]  # fmt: skip


def _build(name: str, num_tokens: int) -> nn.Module:
    # Imported here: the import takes seconds, and a launcher needs only the models' names.
    from transformers import GPT2Config, GPT2LMHeadModel

    num_layers, num_heads, width, _ = _SIZES[name]
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=num_tokens, n_positions=_POSITIONS, n_embd=width, n_layer=num_layers,
            n_head=num_heads, **options_of_transformers(),
        )
    )  # fmt: skip
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    return net


class Family:
    """The models gpt2, gpt2_medium and gpt2_tiny.

    gpt2 is the smallest published one, of 124 million parameters; gpt2_tiny is for CPUs.
    """

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """Return the spec of a model in `names`, which builds it with random weights."""
        *_, num_tokens = _SIZES[name]
        return LanguageModel(
            name, partial(_build, name), num_tokens, _POSITIONS, cuts_sequences=True
        )
