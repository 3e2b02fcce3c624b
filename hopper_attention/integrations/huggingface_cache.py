"""Hugging Face generation through `flash_attn_with_kvcache`: a cache for `model.generate(past_key_values=…)`.

    huggingface.register()
    model.set_attn_implementation("hopper_attention")
    model.generate(tokens, past_key_values=KeyValueCache(model, longest=8192), max_new_tokens=…)

A model's attention hands its new key and value to the cache, and what that returns to the attention function.
Of a step by one token this cache returns a mark without data, so that another attention function fails; ours
has the kernel store them and attend to all keys in one launch. What has more tokens, or a mask because of
padding, is stored first and goes the way it would without this cache.

Memory is taken once, for `longest` tokens. How many are stored is kept on the GPU for the kernel, and on the
host for who asks; a CUDA graph of a step that is given its `position_ids` advances the first of them alone.
"""

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..functional import flash_attn_with_kvcache
from .huggingface import MARK, NAME


class KeyValueCache(Cache):
    """Keys and values of `model` for up to `longest` tokens of each sequence.

    Raises ValueError unless the model's attention is "hopper_attention" and every layer of it sees all keys.
    """

    def __init__(self, model: PreTrainedModel, longest: int):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            raise ValueError(
                f"KeyValueCache is for attn_implementation={NAME!r}, not {config._attn_implementation!r}"
            )
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise ValueError("KeyValueCache is for models whose layers all see every key")
        if not isinstance(longest, int):
            raise TypeError(f"longest must be an integer, not {longest!r}")
        if longest < 1:
            raise ValueError(f"longest must be positive, not {longest}")
        self.lengths: torch.Tensor | None = None  # int32 (batch,): tokens that every layer has stored
        super().__init__(layers=[Layer(self, i, longest) for i in range(config.num_hidden_layers)])

    @property
    def last(self) -> "Layer":
        return self.layers[-1]

    def reset(self) -> None:
        super().reset()
        if self.lengths is not None:
            self.lengths.zero_()


class Layer(CacheLayerMixin):
    """keys and values (batch, longest, kv heads, head_dim), of which `stored` count."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: KeyValueCache, index: int, longest: int):
        super().__init__()
        self.cache, self.index, self.longest = cache, index, longest
        self.stored = 0
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None  # of a step, for the kernel to store

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        if value_states.shape != key_states.shape:
            raise ValueError(
                f"KeyValueCache is for values like keys, {tuple(key_states.shape)}, not "
                f"{tuple(value_states.shape)}"
            )
        lengths = self.cache.lengths
        if lengths is not None and lengths.device != self.device:
            raise ValueError(
                f"KeyValueCache is for a model on one GPU, not layers on {lengths.device} and {self.device}"
            )
        shape = batch, self.longest, heads, head_dim
        self.keys, self.values = (key_states.new_zeros(shape) for _ in range(2))
        self.elsewhere = torch.empty((batch, heads, 1, head_dim), dtype=self.dtype, device="meta")
        setattr(self.elsewhere, MARK, self)
        if lengths is None:
            self.cache.lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states (batch, kv heads, tokens, head_dim): what the attention function is
        given in their place, (batch, kv heads, keys, head_dim). Raises ValueError where they do not fit."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.new is not None or (self.index == 0 and self.stored != self.cache.last.stored):
            raise RuntimeError(f"KeyValueCache: the last step did not end in {NAME!r} in every layer")
        batch, _, tokens, _ = key_states.shape
        if batch != len(self.keys):
            raise ValueError(f"KeyValueCache was begun with a batch of {len(self.keys)}, not of {batch}")
        if self.stored + tokens > self.longest:
            raise ValueError(f"KeyValueCache has room for {self.longest} tokens, not {self.stored + tokens}")
        if tokens == 1 and self.stored:
            self.new = key_states, value_states
            return self.elsewhere, self.elsewhere
        return self.store(key_states, value_states)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All keys and values, with the new ones."""
        self.new = None
        before, tokens = self.stored, key_states.shape[2]
        for x, new in ((self.keys, key_states), (self.values, value_states)):
            x[:, before : before + tokens] = new.transpose(1, 2)
        self._advance(tokens)
        if not before:
            return key_states, value_states
        return tuple(x[:, : self.stored].transpose(1, 2) for x in (self.keys, self.values))

    def attend(self, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Store the new key and value, and attend to all: query (batch, heads, 1, head_dim), the result
        (batch, 1, heads, head_dim)."""
        new = [x.transpose(1, 2) for x in self.new]
        o = flash_attn_with_kvcache(
            query.transpose(1, 2), self.keys, self.values, *new, cache_seqlens=self.cache.lengths,
            softmax_scale=scaling,
        )  # fmt: skip
        self.new = None
        self._advance(1)
        return o

    def _advance(self, tokens: int) -> None:
        self.stored += tokens
        # The lengths of all layers, when the last has stored: until then layers read where to.
        if self is self.cache.last and tokens:
            self.cache.lengths += tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the last tokens, as transformers means it a negative number: drafts that were not
        taken. Raises ValueError for a positive one."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes how many tokens go, as a negative number, not {tokens_to_remove}")
        self._advance(max(tokens_to_remove, -self.stored))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("KeyValueCache keeps its batch: it does not select sequences")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("KeyValueCache keeps its batch: it does not repeat sequences")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.stored + query_length, 0

    def get_seq_length(self) -> int:
        return self.stored

    def get_max_length(self) -> int:
        return self.longest

    def reset(self) -> None:
        super().reset()
        self.stored, self.new = 0, None
