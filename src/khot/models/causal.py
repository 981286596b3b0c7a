from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from khot.beams import Beams, beam_search
from khot.beams.hard import Stop


class CausalState:
    """The cache of a causal model of transformers and the mask of what its rows have seen, for ``K`` beams of each of ``B`` prompts."""

    def __init__(self, cache: Any, mask: Tensor) -> None:
        self.cache, self.mask = cache, mask  # (B K, length), 0 where a prompt is padded

    def reorder(self, index: Tensor) -> CausalState:
        """The state of the beams ``index`` ``(B, K)``."""
        rows, k = index.shape
        flat = (torch.arange(rows, device=index.device).unsqueeze(1) * k + index).flatten()
        self.cache.reorder_cache(flat)
        return CausalState(self.cache, self.mask[flat])


@torch.no_grad()
def beam_generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    num_beams: int,
    max_new_tokens: int,
    eos: int | Sequence[int] | None = None,
    length_penalty: float = 1.0,
    early_stopping: Stop = False,
    num_return: int | None = None,
) -> Beams:
    """:func:`khot.beam_search` over a causal language model of transformers: the same tokens as its ``generate``.

    Args:
        model: a causal model of transformers with a cache that can be reordered, e.g. ``LlamaForCausalLM``.
        input_ids: ``(B, L)``, the prompts, padded on the left.
        attention_mask: ``(B, L)``, 0 where a prompt is padded; None means that none is.
        num_beams, length_penalty, early_stopping, num_return: as in :func:`khot.beam_search`.
        max_new_tokens: the most tokens after the prompt.
        eos: by default what the model's generation config says.

    Returns:
        ``sequences (B, N, T)`` without the prompt, ``scores``, ``lengths``, best first.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).eval()
        >>> beam_generate(model, torch.tensor([[3, 4, 5]]), num_beams=2, max_new_tokens=4).sequences.shape
        torch.Size([1, 2, 4])
    """
    if input_ids.ndim != 2 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids must have shape (B, L) with at least one token, got {tuple(input_ids.shape)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape or not bool((mask[:, -1] == 1).all()):
        raise ValueError("attention_mask must have the shape of input_ids and end in 1: prompts are padded on the left")
    if eos is None:
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)

    def step(tokens: Tensor, state: CausalState) -> tuple[Tensor, CausalState]:
        seen = torch.cat([state.mask, torch.ones_like(state.mask[:, :1])], 1)
        place = seen.sum(1, keepdim=True) - 1
        made = model(tokens.reshape(-1, 1), attention_mask=seen, position_ids=place, past_key_values=state.cache, use_cache=True)
        log_probs = made.logits[:, -1].float().log_softmax(-1)
        return log_probs.unflatten(0, tokens.shape), CausalState(made.past_key_values, seen)

    return beam_search(
        step,
        input_ids[:, -1],
        num_beams=num_beams,
        max_length=max_new_tokens,
        eos=eos,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return=num_return,
        state=_read_prompt(model, input_ids[:, :-1], mask[:, :-1], num_beams),
    )


def _read_prompt(model: nn.Module, tokens: Tensor, mask: Tensor, beams: int) -> CausalState:
    """The prompt but for its last token, read once and given to every beam."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)  # pyright: ignore[reportArgumentType]
    if tokens.shape[1]:
        places = (mask.cumsum(1) - 1).clamp(min=0)
        cache = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True).past_key_values
        cache.batch_repeat_interleave(beams)
    return CausalState(cache, mask.repeat_interleave(beams, 0))
