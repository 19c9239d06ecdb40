"""DCViT and DCFormer for PyTorch: models with Dynamically Composable Multi-Head Attention, in one file.

The file needs torch and transformers 5.4 only. `dcvit convert RUN FOLDER --to hf` copies it beside the weights, and
`AutoModelForCausalLM` or `AutoModelForImageClassification` loads it with `trust_remote_code=True`, or `AutoModel`
without the head. The models follow Xiao et al., 2024 (https://arxiv.org/abs/2405.08553): before and after the softmax,
the H scores of each query-key pair are multiplied by an H×H matrix that is computed from the query and the key (Eqn
4-7).

Letters in comments: B batch, T queries, S keys, M width, H heads, K key heads, D head width, R rank, G groups of
heads, J = H/G, N tokens. Attention with composition holds B×H×T×S scores in memory. Without composition, or where that
can be folded into queries and outputs, it is PyTorch's `scaled_dot_product_attention`. Dropout is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.versions import require_version

require_version("transformers>=5.4")  # before, static caches do not count their tokens

RMS_EPSILON = 1e-6  # of the dynamic projections
ROTARY_BASE_2D = 100.0  # with posemb="rotary2d"
WINDOW_PATTERNS = {  # L: a layer with a window
    "none": "G", "1:0": "L", "1:1": "LG", "3:1": "LGLL", "7:1": "LGLLLLLL",
}  # fmt: skip
FIELDS = {  # of both models, with their defaults
    "width": 768, "depth": 12, "num_heads": 12, "num_key_heads": None, "mlp_dim": None, "compose": "both",
    "branches": "qk", "projection": True, "gate": True, "static": False, "rank": 2, "groups": 1, "compose_gelu": "tanh",
    "qk_norm": None, "qk_norm_epsilon": 1e-6, "initializer_range": 0.02,
}  # fmt: skip
IMAGE_FIELDS = {
    **FIELDS, "image_size": 224, "num_channels": 3, "patch_size": [16, 16], "posemb": "learn", "pool_type": "gap",
    "registers": 0, "rep_size": False, "mlp": "gelu_tanh", "norm_epsilon": 1e-6, "layer_scale": None,
    "qkv_bias": "qkv", "pre_norm": False, "pool_norm": False,
}  # fmt: skip
TEXT_FIELDS = {
    **FIELDS, "vocab_size": 50257, "context": 2048, "position": "rotary", "rotary_fraction": 1.0,
    "rotary_base": 10_000.0, "rotary_scaling": None, "norm": "rmsnorm", "norm_epsilon": 1e-6, "mlp": "swiglu",
    "mlp_groups": None, "use_bias": False, "qkv_bias": None, "parallel": False, "window_pattern": "none",
    "window": 256, "prefill_window": None, "end_of_text": None, "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
# The name of the cache in outputs: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
NAMES = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "num_heads"}


class DCViTConfig(PreTrainedConfig):
    """Config of a vision transformer: the fields of `dcvit.models.vit`. `image_size`: a number, or [height, width]."""

    model_type = "dcvit"
    attribute_map = NAMES

    def __init__(self, **kwargs: Any):
        for name, default in IMAGE_FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)


class DCFormerConfig(PreTrainedConfig):
    """Config of a decoder-only language model: the fields of `dcvit.models.lm`."""

    model_type = "dcformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {**NAMES, "max_position_embeddings": "context"}  # noqa: RUF012

    def __init__(self, **kwargs: Any):
        for name, default in TEXT_FIELDS.items():
            setattr(self, name, kwargs.get(name, default))
        super().__init__(**{k: v for k, v in kwargs.items() if k not in TEXT_FIELDS or k == "tie_word_embeddings"})


Config: TypeAlias = DCViTConfig | DCFormerConfig
Input: TypeAlias = Tensor | Cache | None  # of a layer, besides the tokens


class Composition(nn.Module):
    """One composition: its parameters, the weights computed from tokens, and the product with scores."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.groups, self.rank = config.num_heads, config.groups, config.rank
        self.exact = config.compose_gelu == "exact"
        size = self.heads // self.groups
        inner = 2 * self.rank * size
        shapes: dict[str, tuple[int, ...]] = {}
        for side in config.branches:
            if config.projection:
                shapes |= {f"w_{side}1": (config.width, self.groups, inner), f"w_{side}2": (self.groups, inner, inner)}
            if config.gate:
                shapes[f"w_{side}g"] = (config.width, self.heads)
        if config.static:
            shapes["w_b"] = (self.groups, size, size)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.has_projection, self.has_gate, self.sides = config.projection, config.gate, config.branches

    def initialize(self) -> None:
        """Set the initial values of Section 4: a composition starts close to the identity."""
        size = self.heads // self.groups
        for name, value in self.named_parameters():
            std = {
                "1": math.sqrt(2 / (value.shape[0] + value.shape[-1])),
                "2": 0.02 / (math.sqrt(2 * size * self.rank) * (size + self.rank)),
                "g": 0.05 * math.sqrt(2 / (value.shape[0] + size)),
                "b": 0.1 * math.sqrt(1 / size),
            }[name[-1]]
            nn.init.normal_(value, std=std)

    def weights(self, x: Tensor, side: str) -> Tensor:
        """Return the dynamic weights of tokens (Eqn 5-6) as one vector each: down and up projection, then gate.

        The vectors of keys ("k") never change, so that they are cached beside the keys.
        """
        parts = []
        if side in self.sides and self.has_projection:
            w_1, w_2 = self.get_parameter(f"w_{side}1"), self.get_parameter(f"w_{side}2")
            hidden = torch.einsum("bnm,mgi->bngi", x, w_1)
            hidden = functional.gelu(hidden, approximate="none" if self.exact else "tanh")
            both = torch.einsum("bngi,gio->bngo", hidden, w_2).float()
            down, up = both.unflatten(-1, (2, self.rank, -1)).unbind(3)  # B N G R J
            down = down * torch.rsqrt(down.square().mean(-1, keepdim=True) + RMS_EPSILON)
            parts += [down.flatten(2), up.flatten(2)]
        if side in self.sides and self.has_gate:
            parts.append(torch.tanh(x @ self.get_parameter(f"w_{side}g")).float())
        return torch.cat(parts, dim=-1) if parts else x.new_zeros((*x.shape[:2], 0), dtype=torch.float32)

    def forward(self, a: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Compose scores B H T S, or without key-wise branches vectors B H T D (Eqn 7), by the results of `weights`."""
        a = a.unflatten(1, (self.groups, -1))  # B G J T S
        out = a
        if hasattr(self, "w_b"):
            out = out + torch.einsum("bgits,gij->bgjts", a, self.w_b.float())
        for side, flat in (("q", queries), ("k", keys)):
            token = {"q": "t", "k": "s"}[side]
            if side in self.sides and self.has_projection:
                size = self.rank * self.heads
                halves = flat[..., :size], flat[..., size : 2 * size]
                down, up = (x.unflatten(-1, (self.groups, self.rank, -1)) for x in halves)
                hidden = torch.einsum(f"bgjts,b{token}grj->bgrts", a, down)
                out = out + torch.einsum(f"bgrts,b{token}grj->bgjts", hidden, up)
            if side in self.sides and self.has_gate:
                gate = flat[..., -self.heads :].transpose(1, 2).unflatten(1, (self.groups, -1))  # B G J N
                out = out + a * (gate.unsqueeze(-1) if side == "q" else gate.unsqueeze(-2))
        return out.flatten(1, 2)


def pack(x: Tensor, tokens: Tensor) -> Tensor:
    """Append I numbers of each token, B N I, to its keys or values, B K N D, so that a cache holds both."""
    heads = x.shape[1]
    tokens = functional.pad(tokens, (0, -tokens.shape[-1] % heads))
    return torch.cat([x, tokens.unflatten(-1, (heads, -1)).transpose(1, 2).to(x.dtype)], dim=-1)


def unpack(x: Tensor, head_dim: int, numbers: int) -> tuple[Tensor, Tensor]:
    """Invert `pack`: return the keys or values, B K N D, and the numbers, B N I."""
    return x[..., :head_dim], x[..., head_dim:].transpose(1, 2).flatten(2)[..., :numbers]


def rotate(x: Tensor, positions: Tensor, width: int, base: float, scaling: list[float] | None) -> Tensor:
    """Apply a rotary position embedding to the first `width` of the D numbers of x, B H N D; pairs are halves apart.

    Positions are numbers, B N, or places in two dimensions, B N 2, each of which rotates half of the pairs. `scaling`
    divides the frequencies for longer contexts: by a factor, or for (factor, low, high, context) less for pairs that
    turn more often than `low` times in the context, and not for those that turn `high` times or more.
    """
    step = 2 if positions.dim() == 2 else 4
    frequencies = base ** (-torch.arange(0, width, step, device=x.device, dtype=torch.float32) / width)
    factor, *ramp = scaling or [1.0]
    kept: Tensor | float = 0.0
    if ramp:
        low, high, context = ramp
        kept = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = (positions[..., None].float() * frequencies).flatten(2)[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, x[..., width:]], dim=-1)


def make_norm(kind: str, width: int, epsilon: float, bias: bool = True) -> nn.Module:
    """Return a new norm layer over `width` numbers, "rmsnorm" or "layernorm"."""
    return nn.RMSNorm(width, epsilon) if kind == "rmsnorm" else nn.LayerNorm(width, epsilon, bias=bias)


def main_norm(config: Config) -> nn.Module:
    """Return a new norm layer over the model's width, of the kind in the config."""
    return make_norm(getattr(config, "norm", "layernorm"), config.width, config.norm_epsilon)


class Attention(nn.Module):
    """Multi-head attention, with the compositions `pre` and `post` where `compose` names them."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer, self.heads = layer, config.num_heads
        self.head_dim = head_dim = config.width // config.num_heads
        key_heads = config.num_key_heads or config.num_heads
        bias = getattr(config, "use_bias", True)
        biases = config.qkv_bias if config.qkv_bias is not None else "qkv" * bias
        self.query = nn.Linear(config.width, config.width, bias="q" in biases)
        self.key, self.value = (nn.Linear(config.width, head_dim * key_heads, bias=name in biases) for name in "kv")
        self.out = nn.Linear(config.width, config.width, bias=bias)
        if config.qk_norm:
            norm = config.qk_norm, self.head_dim, config.qk_norm_epsilon, False
            self.query_norm, self.key_norm = make_norm(*norm), make_norm(*norm)
        self.pre = Composition(config) if config.compose in ("pre", "both") else None
        self.post = Composition(config) if config.compose in ("post", "both") else None
        # Heads that share a key head, or do not mix, composed by their query alone: both products of attention commute.
        query_wise = config.branches == "q" or not (config.projection or config.gate)
        self.folded = query_wise and (config.groups % key_heads == 0 or not (config.projection or config.static))
        self.rotary, self.rotary_base, self.scaling = 0, 0.0, getattr(config, "rotary_scaling", None)
        if getattr(config, "position", None) == "rotary":
            self.rotary, self.rotary_base = round(config.rotary_fraction * head_dim), config.rotary_base
        if getattr(config, "posemb", None) == "rotary2d":
            self.rotary, self.rotary_base = head_dim, ROTARY_BASE_2D

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        ends: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `x` to itself and the cache; `mask` is True where a key is visible.

        `ends`, B T 1, are cached beside the keys of the first layer. Returns the output and, if asked for, the composed
        weights, B H T S.
        """
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if hasattr(self, "query_norm"):
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary and positions is not None:
            q, k = (rotate(y, positions, self.rotary, self.rotary_base, self.scaling) for y in (q, k))
        compositions = [c for c in (self.pre, self.post) if c is not None]
        queries, keys = ([c.weights(x, side) for c in compositions] for side in "qk")
        if cache is not None:
            k, v, keys = self._cached(cache, k, v, keys, ends)
        k, v = (y.repeat_interleave(self.heads // y.shape[1], dim=1) for y in (k, v))
        if (self.folded or not compositions) and not return_weights:
            q = q if self.pre is None else self.pre(q.float(), queries[0], keys[0]).to(q.dtype)
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = out if self.post is None else self.post(out.float(), queries[-1], keys[-1]).to(out.dtype)
            return self.out(out.transpose(1, 2).flatten(2)), None
        a = q.float() @ k.float().transpose(-1, -2) / math.sqrt(self.head_dim)  # Eqn 4 in float32
        a = a if self.pre is None else self.pre(a, queries[0], keys[0])
        a = (a if mask is None else a.masked_fill(~mask, torch.finfo(a.dtype).min)).softmax(-1)
        a = a if self.post is None else self.post(a, queries[-1], keys[-1])  # a masked weight is 0 in all heads
        out = self.out((a.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return out, a if return_weights else None

    def _cached(
        self, cache: Cache, k: Tensor, v: Tensor, keys: list[Tensor], ends: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Extend the cache; return keys, values and key-wise weights of the tokens in it and of the new ones.

        The cache stores them in one tensor (`pack`), in the dtype of the keys.
        """
        at = torch.arange(k.shape[2], device=k.device) + cache.get_seq_length(self.layer)
        with_k, with_v = [*([] if ends is None else [ends]), *keys[:1]], keys[1:]
        packed = [pack(y, torch.cat(more, dim=-1)) if more else y for y, more in ((k, with_k), (v, with_v))]
        packed = cache.update(*packed, self.layer)
        (k, first), (v, last) = (
            unpack(y, self.head_dim, sum(x.shape[-1] for x in more))
            for y, more in zip(packed, (with_k, with_v), strict=True)
        )
        earlier = [first[..., 0 if ends is None else 1 :], last]
        keys = [y.float().index_copy(1, at, new) for y, new in zip(earlier, keys, strict=False)]
        return k, v, keys


class Mlp(nn.Module):
    """Two linear layers; "swiglu" multiplies by a third, and a gate of groups by a softmax over the groups."""

    def __init__(self, config: Config, bias: bool = True):
        super().__init__()
        hidden = config.mlp_dim or 4 * config.width
        self.activation, self.groups = config.mlp, getattr(config, "mlp_groups", None)
        self.fc_in = nn.Linear(config.width, hidden, bias=bias)
        if self.activation == "swiglu":
            self.fc_gate = nn.Linear(config.width, hidden, bias=bias)
        if self.groups:
            self.group_gate = nn.Linear(config.width, self.groups, bias=False)
        self.fc_out = nn.Linear(hidden, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc_in(x)
        if self.activation == "swiglu":
            hidden = functional.silu(hidden) * self.fc_gate(x)
        else:
            hidden = functional.gelu(hidden, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        if self.groups:
            gate = self.group_gate(x).float().softmax(-1).to(hidden.dtype)
            hidden = (hidden.unflatten(-1, (self.groups, -1)) * gate.unsqueeze(-1)).flatten(-2)
        return self.fc_out(hidden)


class Block(GradientCheckpointingLayer):
    """Attention and MLP, each after a norm and inside a residual connection."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.parallel = getattr(config, "parallel", False)
        self.attention_norm, self.mlp_norm = main_norm(config), main_norm(config)
        self.attention, self.mlp = Attention(config, layer), Mlp(config, getattr(config, "use_bias", True))
        if getattr(config, "layer_scale", None) is not None:
            self.layer_scale_0, self.layer_scale_1 = (nn.Parameter(torch.ones(config.width)) for _ in range(2))

    def forward(self, x: Tensor, *inputs: Input, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the tokens after this layer and, if asked for, the weights; `inputs` are those of `Attention`."""
        y, weights = self.attention(self.attention_norm(x), *inputs, return_weights=return_weights)
        scaled = hasattr(self, "layer_scale_0")
        after = x + (y * self.layer_scale_0 if scaled else y)
        y = self.mlp(self.mlp_norm(x if self.parallel else after))
        return after + (y * self.layer_scale_1 if scaled else y), weights


class DCModel(PreTrainedModel):
    """Base class of both models: properties that transformers reads, and initial values of parameters."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def run(
        self, x: Tensor, arguments: Sequence[tuple[Input, ...]], attentions: bool | None, hidden_states: bool | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Return the tokens after all layers and, where the call or the config says so, between them, and the weights.

        `arguments` are those of each layer after the tokens, B T M.
        """
        wanted = self.config.output_attentions if attentions is None else attentions
        keeps = self.config.output_hidden_states if hidden_states is None else hidden_states
        states: list[Tensor] = [x]
        weights: list[Tensor] = []
        for layer, values in zip(self.layers, arguments, strict=True):
            x, a = layer(x, *values, return_weights=bool(wanted))
            if keeps:
                states.append(x)
            if wanted:
                weights.append(a)
        return x, tuple(states) if keeps else None, tuple(weights) if wanted else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, Composition):
            module.initialize()
        elif isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        for name, value in module.named_parameters(recurse=False):
            if name in ("position", "cls", "registers", "probe"):
                nn.init.normal_(value, std=std)
            elif name == "bias" or name.startswith("layer_scale"):
                nn.init.constant_(value, 0 if name == "bias" else self.config.layer_scale)


class AttentionPool(nn.Module):
    """A learned probe that attends to all patches, without composition; then an MLP."""

    def __init__(self, config: DCViTConfig):
        super().__init__()
        self.heads, self.probe = config.num_heads, nn.Parameter(torch.zeros(1, 1, config.width))
        names = ("query", "key", "value", "out")
        self.attention = nn.ModuleDict({name: nn.Linear(config.width, config.width) for name in names})
        self.norm, self.mlp = main_norm(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        inputs = {"query": self.probe.expand(len(x), -1, -1), "key": x, "value": x}
        projected = (self.attention[name](y) for name, y in inputs.items())
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)
        y = functional.scaled_dot_product_attention(q, k, v)
        y = self.attention["out"](y.transpose(1, 2).flatten(2))
        return (y + self.mlp(self.norm(y)))[:, 0]


class DCViTBody(DCModel):
    """A vision transformer without its head. `pixel_values` are B C height width, as preprocessor_config.json says."""

    config_class = DCViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        patch = config.patch_size
        self.patches = nn.Conv2d(config.num_channels, config.width, patch, patch, bias=not config.pre_norm)
        self.pre_norm = main_norm(config) if config.pre_norm else nn.Identity()
        size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
        self.grid = [pixels // patch for pixels, patch in zip(size, config.patch_size, strict=True)]
        if config.posemb == "learn":
            self.position = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], config.width))
        if config.pool_type.startswith("tok"):
            self.cls = nn.Parameter(torch.zeros(1, 1, config.width))
        if config.registers:
            self.registers = nn.Parameter(torch.zeros(1, config.registers, config.width))
        self.layers, self.norm = nn.ModuleList(Block(config, i) for i in range(config.depth)), main_norm(config)
        if config.pool_type == "map":
            self.pool = AttentionPool(config)
        width = config.width * (2 if "+" in config.pool_type else 1)
        if config.rep_size:
            before, width = width, config.width if config.rep_size is True else config.rep_size
            self.pre_logits = nn.Linear(before, width)
        self.num_features = width

    def get_input_embeddings(self) -> nn.Module:
        return self.patches

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, output_attentions: bool | None = None, output_hidden_states: bool | None = None
    ) -> BaseModelOutputWithPooling:
        """Return the tokens after the last norm, and as `pooler_output` the features of each image."""
        x = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        if self.config.posemb != "rotary2d":
            x = x + (self.position if self.config.posemb == "learn" else self._sincos(x))
        extra = [getattr(self, name).expand(len(x), -1, -1) for name in ("cls", "registers") if hasattr(self, name)]
        x = self.pre_norm(torch.cat([*extra, x], dim=1))
        places = self._places(x) if self.config.posemb == "rotary2d" else None
        x, states, weights = self.run(x, [(None, places)] * len(self.layers), output_attentions, output_hidden_states)
        x = x if self.config.pool_norm else self.norm(x)
        features = self._pooled(x)
        features = self.norm(features) if self.config.pool_norm else features
        features = torch.tanh(self.pre_logits(features)) if self.config.rep_size else features
        return BaseModelOutputWithPooling(
            last_hidden_state=x, pooler_output=features, hidden_states=states, attentions=weights
        )

    def _pooled(self, x: Tensor) -> Tensor:
        """Return one vector for each image, or all patches with `pool_type="none"`."""
        kind, patches = self.config.pool_type, x[:, x.shape[1] - self.grid[0] * self.grid[1] :]
        if kind == "map":
            return self.pool(patches)
        if kind in ("none", "gap"):
            return patches if kind == "none" else patches.mean(1)
        first = patches[:, 0] if kind == "0" else x[:, 0]
        last = x[:, 1] if kind == "tok+reg" else patches.mean(1)
        return torch.cat([first, last], dim=-1) if "+" in kind else first

    def _places(self, x: Tensor) -> Tensor:
        """Return 2π·(y, x) of the centers of patches, y and x in [-1, 1], and zeros for the tokens before: 1 N 2."""
        centers = [2 * math.pi * ((2 * torch.arange(n, device=x.device) + 1) / n - 1) for n in self.grid]
        y_x = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).flatten(0, 1)
        return functional.pad(y_x, (0, 0, x.shape[1] - len(y_x), 0))[None]

    def _sincos(self, x: Tensor) -> Tensor:
        """Return MoCo v3's fixed embedding: sine and cosine of x, then of y, at width/4 frequencies."""
        y_x = torch.meshgrid(*(torch.arange(n, device=x.device) for n in self.grid), indexing="ij")
        count = self.config.width // 4
        frequencies = 10_000.0 ** (-torch.arange(count, device=x.device, dtype=torch.float64) / (count - 1))
        angles = [grid.flatten()[:, None] * frequencies for grid in reversed(y_x)]
        return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)[None].to(x.dtype)


class DCViTModel(DCViTBody):
    """A vision transformer without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        self.post_init()


class DCViTForImageClassification(DCViTBody):
    """A vision transformer with a linear head."""

    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        if config.num_labels:
            self.head = nn.Linear(self.num_features, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> ImageClassifierOutput:
        """Return the logits, or the features of a model without a head, and the loss that `config.problem_type` says.

        `labels` are classes, B, or with "multi_label_classification" 1 and 0 of each class, B C.
        """
        encoded = super().forward(pixel_values, output_attentions, output_hidden_states, return_dict=True)
        logits = self.head(encoded.pooler_output) if hasattr(self, "head") else encoded.pooler_output
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits.float(), config=self.config)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )


class DCFormerBody(DCModel):
    """A decoder-only language model without its head. The cache holds key-wise compose weights beside the keys."""

    config_class = DCFormerConfig
    _input_embed_layer = "embed"

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        if config.position == "learned":
            self.position = nn.Parameter(torch.zeros(config.context, config.width))
        self.layers, self.norm = nn.ModuleList(Block(config, i) for i in range(config.depth)), main_norm(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the tokens after the last norm, B T M.

        Args:
          input_ids, inputs_embeds: tokens B T, or B T M.
          attention_mask: 1 for real tokens, 0 for padding, also of the tokens in the cache, B S; or True where a query
            may attend to a key, B 1 T S.
          position_ids: B T. Without a mask, a token attends to as many tokens before it as its position says, so that
            the documents of a packed row are apart. After a token that ends a document, positions start again at 0.
          past_key_values, cache: the tokens before, under the names of transformers before and since 5.24.
          use_cache, output_attentions, output_hidden_states: as in transformers. Attentions are the composed weights.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is None and self.config.end_of_text is not None:
            raise ValueError("inputs_embeds do not say where documents end; give input_ids")
        before, wanted = self._cache(past_key_values if cache is None else cache, use_cache)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        ends = None if self.config.end_of_text is None else (input_ids == self.config.end_of_text)[..., None]
        masks, positions = self._masks(x.shape[1], ends, attention_mask, position_ids, before, x)
        if self.config.position == "learned":
            x = x + self.position[positions.clamp(max=self.config.context - 1)]
        pattern = WINDOW_PATTERNS[self.config.window_pattern]
        arguments = [
            (masks[pattern[i % len(pattern)]], positions, before, None if i else ends) for i in range(len(self.layers))
        ]
        x, states, weights = self.run(x, arguments, output_attentions, output_hidden_states)
        x = self.norm(x)
        states = states and (*states[:-1], x)
        kept = {CACHE: before if wanted else None}
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=states, attentions=weights, **kept)

    def _cache(self, given: Cache | None, use_cache: bool | None) -> tuple[Cache | None, bool]:
        """Return the given cache or, if one is wanted, an empty one, and whether the output should hold it."""
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        recomputes = self.training and any(layer.gradient_checkpointing for layer in self.layers)
        if given is not None and recomputes:
            raise ValueError("gradient checkpointing would add its tokens to the cache twice")
        if given is not None and not isinstance(given, DynamicCache | StaticCache):
            raise ValueError(f"the cache is a {type(given).__name__}; the model supports DynamicCache and StaticCache")
        return DynamicCache() if given is None and wanted and not recomputes else given, wanted

    def _masks(
        self,
        length: int,
        ends: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        x: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the visible keys, B 1 T S, of layers with (L) and without a window (G), and the positions B T.

        Positions and visible keys start at the first real token, at the last token that ends a document, or where
        `position_ids` start.
        """
        batch, before = x.shape[0], cache.get_seq_length() if cache is not None else 0
        layer = cache.layers[0] if cache is not None and cache.layers else None
        slots = torch.arange(getattr(layer, "max_cache_len", before + length), device=x.device)
        now = torch.arange(length, device=x.device) + before
        at = now.expand(batch, -1)
        whole = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
        if whole is not None and (whole.dtype != torch.bool or whole.shape[1] != 1):
            found = f"{whole.dtype} of {tuple(whole.shape)}"
            raise ValueError(f"an attention_mask with 4 dimensions should be bool, B 1 T S, found {found}")
        real = None
        starts = last = torch.zeros_like(at)  # last: token that ended a document
        if attention_mask is not None and whole is None:
            real = functional.pad(attention_mask.bool(), (0, len(slots) - attention_mask.shape[1]))
            starts = real.long().argmax(-1, keepdim=True).expand(batch, length)
        if position_ids is not None and attention_mask is None:
            starts = torch.maximum(starts, at - position_ids)
        if ends is not None:
            earlier = ends[:, :0, 0]
            if layer is not None and layer.is_initialized:
                earlier = unpack(layer.keys, self.config.width // self.config.num_heads, 1)[1][..., 0] > 0
            ended = functional.pad(earlier, (0, len(slots) - earlier.shape[1])).index_copy(1, now, ends[..., 0])
            ended = ended if real is None else ended & real
            last = torch.where(ended, slots, 0).cummax(1).values[:, now]
            starts = torch.maximum(starts, last)
        visible = (slots >= starts[..., None]) & (slots <= at[..., None])
        if real is not None:
            visible &= real[:, None]
        if whole is not None:
            visible &= whole[:, 0]
        # Padding attends to itself, so that no row is empty.
        visible |= (slots == at[..., None]) & ~visible.any(-1, keepdim=True)
        window = self.config.prefill_window if length > 1 and self.config.prefill_window else self.config.window
        local = visible & (slots > at[..., None] - window)
        local |= (slots == at[..., None]) & ~local.any(-1, keepdim=True)
        positions = at - starts if position_ids is None else torch.where(last > 0, at - starts, position_ids)
        return {"G": visible[:, None], "L": local[:, None]}, positions.clamp(min=0)


class DCFormerModel(DCFormerBody):
    """A decoder-only language model without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.post_init()


class DCFormerForCausalLM(DCFormerBody, GenerationMixin):
    """A decoder-only language model with its head."""

    accepts_loss_kwargs = True  # `num_items_in_batch`, so that accumulated gradients are those of one large batch
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the logits of each next token. The other arguments are those of `DCFormerBody.forward`.

        Args:
          logits_to_keep: as in transformers.
          labels: tokens B T; the loss is the mean cross-entropy of all but the first. -100 does not count.
          num_items_in_batch: number of labels of all accumulated batches; the loss is the sum, divided by it.
        """
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        encoded = super().forward(*inputs, output_attentions, output_hidden_states, cache, return_dict=True)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        x = encoded.last_hidden_state
        logits = self.lm_head(x if isinstance(keep, int) else x[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch)
        others = {name: getattr(encoded, name) for name in ("hidden_states", "attentions", CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **others)
