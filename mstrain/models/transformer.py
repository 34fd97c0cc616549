"""A decoder-only transformer; `ModelConfig` selects the family.

Activations are x_TxD: the tokens of all sequences, concatenated, by features. The model depends on plans and layouts,
not on algorithms. Consecutive layers with equal plans are one scan, so compile time does not depend on depth.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from mstrain.gemm import Layout, Span, linear
from mstrain.layers.attention import Attention, QkNorm, segment_positions
from mstrain.layers.attention_kernels import AttentionConfig
from mstrain.layers.dense import Inits
from mstrain.layers.embedding import Embedding, Positions
from mstrain.layers.experts import Experts
from mstrain.layers.latent_attention import LatentAttention, LatentPlans
from mstrain.layers.logits import HeadKernel, LogitsHead
from mstrain.layers.loss import cross_entropy
from mstrain.layers.mlp import Mlp
from mstrain.layers.norm import Norm, NormConfig
from mstrain.layers.parameter import unless_initializing
from mstrain.layers.past import Past
from mstrain.layers.rotary import GLOBAL, Rotary
from mstrain.models.config import ModelConfig
from mstrain.models.mtp import MtpLayer, ahead, at_targets
from mstrain.models.plan import BlockPlan, ModelPlan
from mstrain.models.prefetch import extend_layers, scan_layers
from mstrain.models.products import SHARED
from mstrain.models.remat import policy_of
from mstrain.models.staged import StageLayers

MOST_UNROLLED = 48
"""Most layers of a scan that is unrolled on a GPU. XLA:GPU fills the stacks of what a loop saves with zeros, and copies
every value into them and out again: an eighth of the time of a GPT-3 1.3B step. More layers compile for too long."""
DENSE = "dense"  # prefix of the parameters of first, dense layers; `dense_0` in canonical form, too


class Block(nn.Module):
    """A block: residual plus attention, residual plus MLP."""

    model: ModelConfig
    plan: BlockPlan
    seq: int

    @nn.compact
    def __call__(self, x_TxD, window, segments_T=None, past=None):
        """(x_TxD, None), or with `past` (x_TxD, KeysValues of these tokens)."""
        module, mlp, new = self._attention(), self._mlp(segments_T), []

        def attention(h_TxD, seq, window):
            if past is None:
                return module(h_TxD, seq, window, segments_T)
            y_TxD, keys_values = module(h_TxD, seq, window, None, past)
            new.append(keys_values)
            return y_TxD

        x_TxD = self._add_halves(checkpoint_name(x_TxD, "layer-input"), window, attention, mlp)
        return x_TxD, new[0] if new else None

    def _add_halves(self, x_TxD, window, attention, mlp):
        if self.model.parallel_block:
            h_TxD = checkpoint_name(self._norm("norm", self.plan.attention.residual)(x_TxD), "attention-norm")
            y_TxD = self._out("attention", attention(h_TxD, self.seq, window), self.plan.attention.residual)
            z_TxD = self._out("mlp", mlp(self._move(h_TxD, self.plan.mlp.residual)), self.plan.mlp.residual)
            return x_TxD + y_TxD + self._move(z_TxD, self.plan.attention.residual)
        x_TxD = self._half("attention", x_TxD, lambda h: attention(h, self.seq, window), self.plan.attention)
        x_TxD = self._half("mlp", x_TxD, mlp, self.plan.mlp)
        return self._move(x_TxD, self.plan.attention.residual)

    def _half(self, name, x_TxD, half, plans):
        x_TxD = self._move(x_TxD, plans.residual)
        h_TxD = self._norm(f"{name}_norm", plans.residual)(x_TxD) if self.model.pre_norm else x_TxD
        return x_TxD + self._out(name, half(checkpoint_name(h_TxD, f"{name}-norm")), plans.residual)

    def _out(self, name, y_TxD, layout):
        return self._norm(f"{name}_post_norm", layout)(y_TxD) if self.model.post_norm else y_TxD

    def _move(self, x_TxD, layout: Layout):
        return move(x_TxD, layout, self.plan)

    def _norm(self, name, layout):
        m = self.model
        config = NormConfig(m.norm, layout, self.plan.mesh, self.plan.sizes.width, m.norm_epsilon)
        return Norm(config, m.norm_bias, m.unit_offset_norm, name=name)

    def _attention(self):
        m, plans = self.model, self.plan.attention
        config = AttentionConfig(
            scale=m.attention_scale or m.head_dim**-0.5,
            alibi=m.position == "alibi",
            soft_cap=m.attention_soft_cap,
            windowed=any(m.is_local) and bool(m.window) and m.window < self.seq,
            local=m.window,
            split=self.plan.split,
            sinks=m.attention_sinks,
        )
        if isinstance(plans, LatentPlans):
            (sizes, rotary), width = (self.plan.sizes.latent, self._rotary()), self.plan.sizes.width
            assert sizes and rotary
            return LatentAttention(plans, width, sizes, config, self._inits(), rotary, name="attention")
        return Attention(
            plans=plans,
            width=self.plan.sizes.width,
            heads=self.plan.sizes.heads,
            config=config,
            bias=(m.bias != "none", m.bias in ("all", "attention")),
            inits=self._inits(),
            rotary=self._rotary(),
            qk_norm=QkNorm(m.norm_epsilon, m.qk_norm_whole, m.unit_offset_norm) if m.qk_norm else None,
            name="attention",
        )

    def _rotary(self):
        m = self.model
        if m.position != "rotary":
            return None
        alternating = bool(m.latent.key_rank) and m.latent.alternating
        return Rotary(m.rotary_base, m.rotary_fraction, m.rotary_scaling, m.local_rotary_base, alternating)

    def _mlp(self, segments_T):
        m, sizes, routing = self.model, self.plan.sizes, self.model.routing
        if routing:
            like_mlp = m.activation, m.gated, m.bias == "all", self._inits()
            slices, shared = self.plan.expert_slices, self._shared(like_mlp)
            experts = Experts(self.plan.mlp, sizes.width, sizes.hidden, *like_mlp, routing, slices, name="mlp")
            counted = None if segments_T is None else segments_T >= 0
            return lambda x_TxD: experts(x_TxD, counted) + (shared(x_TxD) if shared else 0)
        return Mlp(
            self.plan.mlp, sizes.width, sizes.hidden, m.activation, m.gated, m.bias == "all", self._inits(), name="mlp"
        )

    def _shared(self, like_mlp):
        """The shared experts as one MLP; every one is padded as the others are. None without any."""
        count, hidden = self.model.shared_experts, self.plan.sizes.hidden
        if not count:
            return None
        every = Span(count * hidden.size).padded(count, count, hidden.stored)
        return Mlp(self.plan.mlp, self.plan.sizes.width, every, *like_mlp, name=SHARED)

    def _inits(self):
        scale = self.model.init_scale
        return Inits(nn.initializers.normal(scale), nn.initializers.normal(scale / (2 * self.model.layers) ** 0.5))


class Transformer(nn.Module):
    """Maps tokens_T (int32, concatenated sequences of `seq`) to logits_TxV, float32, as the architecture defines them.

    Within the model tokens have the order of the plan (`mstrain.models.token_order`).

    Attention and positions stay within equal `segments_T` (int32) of a sequence, where they are given.

    Attributes:
      model: sizes and architecture; `model.vocab_size` must be set.
      plan: plans of all products.
      seq: tokens per sequence.
      dtype: of activations and products; parameters are float32.
      remat, offload: the values that layers keep for the backward pass, and those of them in host memory
        (`mstrain.models.remat`).
    """

    model: ModelConfig
    plan: ModelPlan
    seq: int
    dtype: jnp.dtype = jnp.float32
    remat: str = "none"
    offload: str | None = None

    def setup(self):
        model, plan, init = self.model, self.plan, nn.initializers.normal(self.model.init_scale)
        residual, width, vocab_size = plan.head.input_layout, plan.width, model.known_vocab_size
        vocabulary = Span(vocab_size).padded(1, 1, vocab_size + plan.vocab_padding(vocab_size))
        self.embedding = Embedding(plan.embedding_grid, vocabulary, width, init, self.dtype)
        if model.position == "learned":
            self.positions = Positions(residual, plan.mesh, model.context, width, init)
        rows = len(plan.rows) if plan.rows else 0
        self.dense = [self._scan(block, count, model.first_layers) for block, count in plan.dense]
        self.blocks = [self._scan(block, rows or count, model) for block, count in plan.groups]
        config = NormConfig(model.norm, residual, plan.mesh, width, model.norm_epsilon)
        norm = functools.partial(Norm, config, model.norm_bias, model.unit_offset_norm)
        self.final_norm = norm()
        self.mtp = [MtpLayer(self._mtp_block(), norm, plan, init) for _ in range(model.mtp_layers)]
        if not model.tied:
            self.head = HeadKernel(plan.head, width, vocabulary, init)

    def __hash__(self):
        # Flax generates a hash of the fields too, but type checkers do not see it.
        return hash((self.model, self.plan, self.seq, self.dtype, self.remat, self.offload))

    def __call__(self, tokens_T, segments_T=None):
        """Logits after the soft cap, float32 [T, V]: those whose loss is `loss`. Raises ValueError for other shapes."""
        shape = jnp.shape(tokens_T)
        if len(shape) != 1 or not shape[0] or shape[0] % self.seq:
            raise ValueError(
                f"tokens {shape} are not sequences of {self.seq} one after the other, as int32 [n x {self.seq}]. Type "
                "tokens.reshape(-1), or seq= with the length of your sequences."
            )
        return self._logits_head().capped(self.raw_logits(tokens_T, segments_T))[:, : self.model.vocab_size]

    def raw_logits(self, tokens_T, segments_T=None):
        """The output projection: logits before the soft cap, with columns that pad the vocabulary."""
        x_TxD = self._normalized(self._features(tokens_T, segments_T))
        if self.is_initializing():  # no logits depend on these layers
            self._features_ahead(x_TxD, tokens_T, segments_T)
        kernel_DxV = self._head_kernel()
        shape = len(x_TxD), kernel_DxV.shape[1]
        logits_TxV = unless_initializing(self, lambda: linear(x_TxD, kernel_DxV, self.plan.head), shape, x_TxD.dtype)
        return self.plan.order.undo(logits_TxV, self.seq)[: len(tokens_T)]

    def extend(self, tokens_BxT, past: Past):
        """Continues sequences: (logits of the token after the last one, new keys and values).

        Args:
          tokens_BxT: int32 [B, T] with T = `seq`, in slots from `past.slot` on.
          past: `kept` has KeysValues [L, B, S, K, H] for every group of L layers. Without slots (S = 0), tokens attend
            to each other only.

        Returns logits_BxV, float32, and for every group KeysValues [L, B, T, K, H].
        """
        x_TxD, new = self._run(tokens_BxT.reshape(-1), None, past)
        last_BxD = self._normalized(x_TxD.reshape(len(tokens_BxT), self.seq, -1)[:, -1])
        logits = linear(last_BxD, self._head_kernel(), self.plan.head)
        return self._logits_head().capped(logits)[:, : self.model.vocab_size], new

    def _features(self, tokens_T, segments_T):
        """Input of the final norm, x_TxD of padded tokens and features."""
        if self.plan.stages and not self.is_initializing():
            stack, x_TxD = self.variables["params"]["blocks_0"], self.stage_input(tokens_T, segments_T)
            segments_T = self.ordered_segments(segments_T, len(tokens_T))
            return self.stage_layers().one_by_one(stack, x_TxD, segments_T)
        return self._run(tokens_T, segments_T)[0]

    def _run(self, tokens_T, segments_T, past: Past | None = None):
        """(output of the last layer, KeysValues of every group); the latter are None without `past`."""
        x_TxD = self.embed(tokens_T, segments_T, past)
        segments_T = self.ordered_segments(segments_T, len(tokens_T))
        windows, first, new = self._windows(), 0, []
        for i, (blocks, (block, count)) in enumerate(
            zip((*self.dense, *self.blocks), self.plan.every_group, strict=True)
        ):
            x_TxD = move(x_TxD, block.attention.residual, block)
            own = None if past is None else past._replace(kept=past.kept[i]).for_layers(count)
            x_TxD, kept = self._layers(blocks, block, x_TxD, windows[first : first + count], segments_T, own)
            new.append(kept)
            first += count
        return x_TxD, tuple(new)

    def embed(self, tokens_T, segments_T=None, past: Past | None = None):
        """Input of the first layer, x_TxD of padded tokens and features."""
        x_TxD = self._embedded(tokens_T)
        if self.model.position == "learned":
            x_TxD = self.positions(x_TxD, self._positions(tokens_T, segments_T, past))
        return x_TxD

    def stage_input(self, tokens_T, segments_T=None):
        """Input of the first stage of a pipeline: the output of the embedding and of the first, dense layers, which all
        stages compute."""
        x_TxD, windows = self.embed(tokens_T, segments_T), self._windows()
        segments_T = self.ordered_segments(segments_T, len(tokens_T))
        for blocks, (block, count) in zip(self.dense, self.plan.dense, strict=True):
            x_TxD = move(x_TxD, block.attention.residual, block)
            x_TxD, _ = self._layers(blocks, block, x_TxD, windows[:count], segments_T, None)
        return move(x_TxD, self.plan.groups[0][0].attention.residual, self.plan)

    def _embedded(self, tokens_T):
        x_TxD = self.embedding(self.in_order(tokens_T))
        return x_TxD * jnp.asarray(self.model.width**0.5, self.dtype) if self.model.scaled_embedding else x_TxD

    def _normalized(self, x_TxD):
        return self.final_norm(move(x_TxD, self.plan.head.input_layout, self.plan))

    def _head_kernel(self):
        return self.embedding.head_kernel(self.plan.head) if self.model.tied else self.head()

    def loss(self, tokens_T, targets_T, segments_T=None):
        """Negative log-likelihood of every target in nats, float32 [T]."""
        return self._head_loss(self._normalized(self._features(tokens_T, segments_T)), targets_T)

    def losses(self, tokens_T, targets_T, segments_T=None):
        """`loss`, and that of predicting the same targets from 1 to `model.mtp_layers` tokens further back, 0 where a
        sequence or segment has none there; float32 [1 + mtp_layers, T]."""
        return self.head_losses(self._features(tokens_T, segments_T), targets_T, segments_T)

    def head_losses(self, x_TxD, targets_T, segments_T=None):
        """`losses` from the output of the last layer."""
        x_TxD = self._normalized(x_TxD)
        losses, targets = [self._head_loss(x_TxD, targets_T)], targets_T
        for depth, y_TxD in enumerate(self._features_ahead(x_TxD, targets_T, segments_T), 1):
            targets = ahead(targets, self.seq)
            losses.append(at_targets(self._head_loss(y_TxD, targets), segments_T, depth, self.seq))
        return jnp.stack(losses)

    def _features_ahead(self, x_TxD, next_T, segments_T):
        """Input of the output projection for every further token, from that for the tokens `next_T`."""
        found, window = [], self._windows()[-1]
        ordered = self.ordered_segments(segments_T, len(next_T)) if self.mtp else None
        for layer in self.mtp:
            move_to = functools.partial(move, plan=self.plan)
            x_TxD = layer(x_TxD, self._embedded(next_T), window, ordered, move_to)
            found.append(x_TxD)
            next_T = ahead(next_T, self.seq)
        return found

    def _head_loss(self, x_TxD, targets_T):
        """Of the features `x_TxD` after their norm."""
        targets = self.in_order(targets_T)
        losses: jax.Array = cross_entropy(x_TxD, self._head_kernel(), targets, self._logits_head())
        return self.plan.order.undo(losses, self.seq)[: len(targets_T)]

    def stage_layers(self) -> StageLayers:
        """The layers of a pipeline."""
        block = self._block()(self.model, self.plan.groups[0][0], self.seq, parent=None)
        return StageLayers(block, self.model, self.plan)

    def _positions(self, tokens_T, segments_T, past: Past | None):
        if past is not None:
            return jnp.maximum(past.positions(self.seq), 0).reshape(-1)
        if segments_T is None and self.plan.order.parts == 1:
            return jnp.arange(self.seq)
        shape = (-1, self.seq)
        places_BxT = jnp.broadcast_to(jnp.arange(self.seq, dtype=jnp.int32), tokens_T.reshape(shape).shape)
        positions = places_BxT if segments_T is None else segment_positions(segments_T.reshape(shape))
        return self.in_order(positions.reshape(-1))

    def in_order(self, tokens_T, fill: int = 0):
        """Tokens in the order of the plan, with sequences of `fill` appended until all devices have as many.

        Losses and gradients omit these.
        """
        padded = jnp.pad(tokens_T, (0, self._padding(len(tokens_T))), constant_values=fill)
        return self.plan.order.apply(padded.reshape(-1, self.seq))

    def ordered_segments(self, segments_T, tokens: int):
        """Segments of so many tokens `in_order`, below 0 in padding. None without segments, unless experts count tokens
        and some tokens are padding."""
        if segments_T is None:
            if not (self.model.experts and self._padding(tokens)):
                return None
            segments_T = jnp.zeros(tokens, jnp.int32)
        return self.in_order(segments_T, -1)

    def _padding(self, tokens: int) -> int:
        sequences = tokens // self.seq
        return (self.plan.padded_sequences(sequences) - sequences) * self.seq

    def _logits_head(self) -> LogitsHead:
        m = self.model
        return LogitsHead(m.known_vocab_size, self.plan.head, m.logit_soft_cap)

    def _windows(self):
        model = self.model
        return jnp.array([model.window if local else GLOBAL for local in model.is_local], jnp.int32)

    def _layers(self, blocks: Any, plan: BlockPlan, x_TxD, windows, segments_T, past: Past | None):
        first_layers = blocks.name.startswith(DENSE)  # few: gathered before the step
        if self.plan.rows and not first_layers:  # initializing: the stack has rows of padding
            windows = jnp.resize(windows, (len(self.plan.rows),))
        if self.plan.shard != "parameters" or first_layers or self.is_initializing():
            return blocks(x_TxD, windows, segments_T, past)
        block, params = self._block()(self.model, plan, self.seq, parent=None), self.variables["params"][blocks.name]
        if past is not None:
            return extend_layers(block, plan, params, x_TxD, windows, past)
        return scan_layers(block, plan, params, x_TxD, windows, segments_T), None

    def _block(self, scanned: bool = True) -> type[nn.Module]:
        """The module of a layer, `scanned` for one in the body of a loop, with what `remat` saves of it."""
        policy = policy_of(self.remat, self.offload)
        return nn.remat(Block, policy=policy, prevent_cse=not scanned) if policy else Block

    def _mtp_block(self) -> nn.Module:
        return self._block(scanned=False)(self.model, self.plan.groups[-1][0], self.seq, parent=None)

    def _scan(self, plan: BlockPlan, count: int, model: ModelConfig):
        per_layer: Any = (0, nn.broadcast, 0)  # windows and the past have a dim of layers, segments have none
        unrolls = not self.is_initializing() and count <= MOST_UNROLLED and plan.attention.grid.platform == "gpu"
        scanned = nn.scan(
            self._block(not unrolls), variable_axes={"params": 0}, split_rngs={"params": True}, length=count,
            metadata_params={}, in_axes=per_layer, unroll=count if unrolls else 1,
        )  # fmt: skip
        return scanned(model, plan, self.seq)


def move(x_TxD, layout: Layout, plan: BlockPlan | ModelPlan):
    """Constrains activations to `layout`; no communication if they have it."""
    return jax.lax.with_sharding_constraint(x_TxD, jax.sharding.NamedSharding(plan.mesh, layout.spec))
