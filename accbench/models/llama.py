"""Llama's architecture as transformers builds it (Touvron et al., LLaMA, 2023).

RMSNorm, rotary positions, SwiGLU, grouped-query attention, no dropout, untied embeddings.
"""

from functools import partial

from torch import nn

from accbench.models.tasks.language import LanguageModel, options_of_transformers

# name -> (layers, heads, key-value heads, width, MLP width, vocabulary size, positions)
_SIZES = {
    "llama_tiny": (2, 4, 2, 64, 176, 512, 2048),
    # 1.1 billion parameters: the shape of Zhang et al., TinyLlama, 2024.
    "llama_1b": (22, 32, 4, 2048, 5632, 32000, 2048),
    # 8 and 70.6 billion: the shapes of Grattafiori et al., The Llama 3 Herd of Models, 2024.
    "llama_8b": (32, 32, 8, 4096, 14336, 128256, 8192),
    "llama_70b": (80, 64, 8, 8192, 28672, 128256, 8192),
}
TENSOR_PARALLEL_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
SEQUENCE_PARALLEL_PLAN = {
    "model.layers.0": "scatter_input",
    "model.layers.*layernorm": "sequence_parallel",
    "model.layers.*.self_attn": "gather_input",
    "model.layers.*.mlp": "gather_input",
    "model.norm": "gather_output",
}
PIPELINE_PLAN = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]


def _build(name: str, num_tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    num_layers, num_heads, num_kv_heads, width, mlp_width, _, num_positions = _SIZES[name]
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens, max_position_embeddings=num_positions, hidden_size=width,
            intermediate_size=mlp_width, num_hidden_layers=num_layers,
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
            **options_of_transformers(),
        )
    )  # fmt: skip
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    return net


class Family:
    """The models llama_tiny, for CPUs, llama_1b, llama_8b and llama_70b."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """Return the spec of a model in `names`, which builds it with random weights."""
        *_, num_tokens, num_positions = _SIZES[name]
        return LanguageModel(
            name, partial(_build, name), num_tokens, num_positions, cuts_sequences=True
        )
