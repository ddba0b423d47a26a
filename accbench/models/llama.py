"""Llama's architecture as transformers builds it (Touvron et al., LLaMA, 2023).

RMSNorm, rotary positions, SwiGLU, grouped-query attention, no dropout, untied embeddings.
"""

from functools import partial

from torch import nn

from accbench.models.tasks.language import LanguageModel, options_of_transformers

# name -> (layers, heads, key-value heads, width, MLP width, vocabulary size)
_SIZES = {
    "llama_tiny": (2, 4, 2, 64, 176, 512),
    # 1.1 billion parameters: the shape of Zhang et al., TinyLlama, 2024.
    "llama_1b": (22, 32, 4, 2048, 5632, 32000),
}
_POSITIONS = 2048
TENSOR_PARALLEL_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
PIPELINE_PLAN = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]


def _build(name: str, num_tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    num_layers, num_heads, num_kv_heads, width, mlp_width, _ = _SIZES[name]
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens, max_position_embeddings=_POSITIONS, hidden_size=width,
            intermediate_size=mlp_width, num_hidden_layers=num_layers,
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
            **options_of_transformers(),
        )
    )  # fmt: skip
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    return net


class Family:
    """The models llama_tiny, for CPUs, and llama_1b."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """Return the spec of a model in `names`, which builds it with random weights."""
        *_, num_tokens = _SIZES[name]
        return LanguageModel(
            name, partial(_build, name), num_tokens, _POSITIONS, cuts_sequences=True
        )
