"""Generate with transformers' Llama, unmodified: the attention of a step by `flash_attn_with_kvcache`.

    python examples/generate.py                            a batch of 16 prompts of 2048 tokens, 128 new ones
    python examples/generate.py --batch 1 --prompt 8192 --new 256

Weights are random: what is measured is the step. Printed are µs a step and tokens a second of
    sdpa                    transformers' own attention and cache
    hopper_attention        `KeyValueCache`, called by `model.generate` as it stands
    … a graph a step        the same step as a CUDA graph, captured once: lengths are on the GPU
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hopper_attention.integrations import huggingface
from hopper_attention.integrations.huggingface_cache import KeyValueCache

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
}  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def of_a_step(model: LlamaForCausalLM, tokens: torch.Tensor, new: int, with_cache: bool) -> float:
    """Seconds: of generating `new` tokens behind the first, by the difference of two runs."""

    def run(count: int) -> float:
        cache = {"past_key_values": KeyValueCache(model, tokens.shape[1] + new + 1)} if with_cache else {}
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return seconds(lambda: model.generate(tokens, **options, **cache))

    run(3)
    one = run(1)
    return (run(new + 1) - one) / new


def of_a_graph(model: LlamaForCausalLM, tokens: torch.Tensor, new: int) -> float:
    """Seconds of a step that is captured once and then replayed."""
    cache = KeyValueCache(model, tokens.shape[1] + new + 8)
    token = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)

    def step() -> None:
        positions = cache.lengths[:, None].long()
        logits = model(token, past_key_values=cache, position_ids=positions).logits
        token.copy_(logits[:, -1:].argmax(-1))

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(lambda: [graph.replay() for _ in range(new)]) / new


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("examples/generate.py: needs a CUDA GPU")
    huggingface.register()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16).eval()
        tokens = torch.randint(1, SHAPE["vocab_size"], (args.batch, args.prompt))
    found = {}
    model.set_attn_implementation("sdpa")
    found["sdpa"] = of_a_step(model, tokens, args.new, with_cache=False)
    model.set_attn_implementation(huggingface.NAME)
    found[huggingface.NAME] = of_a_step(model, tokens, args.new, with_cache=True)
    found["… a graph a step"] = of_a_graph(model, tokens, args.new)
    for name, time_ in found.items():
        print(f"{name:20} {1e6 * time_:9.1f} µs a step  {args.batch / time_:9.0f} tokens/s")


if __name__ == "__main__":
    main()
