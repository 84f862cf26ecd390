# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters of a transformers decoder by part and layer, from the fields of its config.json.

Supported are Qwen3-MoE, gpt-oss, Mixtral, DeepSeek-V2 and -V3, and models whose configs use the same names. A config
without a required field is refused, and the error names the field; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import moe_layers
from .errors import BadInput
from .files import is_whole, refused
from .model import NAMES, innermost

MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class Experts:
    """Has the experts of one layer. biases: elements of each expert in the dtype of the dense weights."""

    count: int
    top_k: int
    model_width: int
    hidden_width: int
    biases: int = 0

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Returns [out, in] of one expert: gate, up, down."""
        wide, deep = (self.hidden_width, self.model_width), (self.model_width, self.hidden_width)
        return wide, wide, deep

    @property
    def parameters(self) -> int:
        """Returns the number of elements of all experts."""
        return self.count * (sum(rows * cols for rows, cols in self.matrices()) + self.biases)


@dataclass(frozen=True)
class Block:
    """Describes one decoder layer: elements of its dense parameters (attention, norms, router, shared experts or a
    dense MLP), its linear layers {name: [in, out] of each}, and its experts."""

    dense: int
    linears: Mapping[str, tuple[tuple[int, int], ...]]
    experts: Experts | None
    attention_width: int  # elements of a token's queries, keys and values

    @property
    def multiplied(self) -> int:
        """Counts elements of the matrices that multiply each token, without experts."""
        return sum(rows * cols for shapes in self.linears.values() for rows, cols in shapes)


@dataclass(frozen=True)
class Decoder:
    """Describes a model. ends: elements of the embedding, of the head (0 if tied to it), and of the last norm."""

    family: str
    model_width: int
    vocabulary: int
    blocks: tuple[Block, ...]
    head: int
    heads: int
    head_width: int
    dtype: str = "bf16"
    ends: int = field(default=0)

    @property
    def dense(self) -> int:
        """Counts elements of all parameters outside of the experts."""
        return self.ends + sum(block.dense for block in self.blocks)

    def kept_by(self, block: Block) -> int:
        """Counts elements of a token that a layer keeps for its backward, without its experts: inputs and outputs of
        both norms, queries, keys and values before and after their rotation, the output of attention, and the MLP."""
        hidden = sum(cols for _, cols in block.linears.get("gate_proj", ()))
        return 4 * self.model_width + 2 * block.attention_width + self.heads * self.head_width + 3 * hidden

    @property
    def moe_blocks(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.experts is not None)


class _Fields:
    """Reads fields of a config. Errors name a field that is missing or not a whole number."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.data.get(name)
            if value is not None:
                if not is_whole(value):
                    raise refused(name, "a whole number", value)
                return int(value)
        if default is None:
            raise BadInput(f"the field {names[0]!r} is missing; a preview of the whole model needs it")
        return default


def read(data: Mapping[str, Any], dtype: str = "bf16") -> Decoder:
    """Reads a config. BadInput names the field that is wrong."""
    data = innermost(data)
    fields, family = _Fields(data), str(data.get("model_type", ""))
    if family not in FAMILIES:
        raise BadInput(f"model_type is {family!r}; known architectures are {', '.join(FAMILIES)}")
    width, layers = fields.get("hidden_size"), fields.get("num_hidden_layers")
    if not 1 <= layers <= moe_layers.MOST:
        raise refused("num_hidden_layers", f"from 1 to {moe_layers.MOST}", layers)
    heads = fields.get("num_attention_heads")
    if width < 1 or heads < 1:
        raise refused("hidden_size and num_attention_heads", "above 0", (width, heads))
    if data.get("kv_lora_rank") is not None:
        attention, head_width, span = _latent(fields, width, heads)
    else:
        attention, head_width, span = _attention(fields, family, width, heads)
    blocks = []
    kinds: dict[bool, Block] = {}
    for index in range(layers):
        holds = moe_layers.holds_experts(data, index, layers)
        if holds not in kinds:
            kinds[holds] = _block(fields, family, width, attention, span, holds)
        blocks.append(kinds[holds])
    vocabulary = fields.get("vocab_size")
    head = 0 if data.get("tie_word_embeddings") is True else vocabulary * width
    ends = vocabulary * width + head + width
    return Decoder(family, width, vocabulary, tuple(blocks), head, heads, head_width, dtype, ends)


_Attention = tuple[int, dict[str, tuple[tuple[int, int], ...]]]  # the number of other elements, and the matrices


def _attention(fields: _Fields, family: str, width: int, heads: int) -> tuple[_Attention, int, int]:
    head = fields.get("head_dim", default=width // heads)
    own = fields.get("num_key_value_heads", default=heads)
    queries, keys = heads * head, own * head
    linears = {
        "q_proj": ((width, queries),),
        "k_proj": ((width, keys),),
        "v_proj": ((width, keys),),
        "o_proj": ((queries, width),),
    }
    others = 0
    if fields.data.get("attention_bias") is True:
        others += queries + 2 * keys + width
    if family == "qwen3_moe":
        others += 2 * head  # norms of queries and keys
    if family == "gpt_oss":
        others += heads  # sinks
    return (others, linears), head, queries + 2 * keys


def _latent(fields: _Fields, width: int, heads: int) -> tuple[_Attention, int, int]:
    """Counts DeepSeek's multi-head latent attention, whose keys and values come from kv_lora_rank elements."""
    rank, rope = fields.get("kv_lora_rank"), fields.get("qk_rope_head_dim")
    plain, value = fields.get("qk_nope_head_dim"), fields.get("v_head_dim")
    queries = heads * (plain + rope)
    linears: dict[str, tuple[tuple[int, int], ...]] = {}
    others = rank  # the norm of that vector
    bias = fields.data.get("attention_bias") is True
    if fields.data.get("q_lora_rank") is not None:
        low = fields.get("q_lora_rank")
        linears["q_a_proj"], linears["q_b_proj"] = ((width, low),), ((low, queries),)
        others += low + bias * low
    else:
        linears["q_proj"] = ((width, queries),)
    linears["kv_a_proj_with_mqa"] = ((width, rank + rope),)
    linears["kv_b_proj"] = ((rank, heads * (plain + value)),)
    linears["o_proj"] = ((heads * value, width),)
    others += bias * (rank + rope + width)
    return (others, linears), plain + rope, queries + heads * (plain + rope + value)


def _block(fields: _Fields, family: str, width: int, attention: _Attention, span: int, holds: bool) -> Block:
    others, linears = attention[0] + 2 * width, dict(attention[1])
    experts = None
    if holds:
        count, top_k = fields.get(*NAMES["num_experts"]), fields.get(*NAMES["top_k"])
        hidden = fields.get("moe_intermediate_size", "intermediate_size")
        if not (count >= 1 and 1 <= top_k <= count and hidden >= 1):
            raise refused("experts, experts of a token and their width", "above 0", (count, top_k, hidden))
        biases = 2 * hidden + width if family == "gpt_oss" else 0
        experts = Experts(count, top_k, width, hidden, biases)
        others += count * width + (count if family == "gpt_oss" else 0)  # the router
        shared = fields.get("n_shared_experts", default=0) * hidden
    else:
        shared = fields.get("intermediate_size")
    if shared:
        linears |= {"gate_proj": ((width, shared),), "up_proj": ((width, shared),), "down_proj": ((shared, width),)}
    whole = others + sum(rows * cols for shapes in linears.values() for rows, cols in shapes)
    return Block(whole, linears, experts, span)
