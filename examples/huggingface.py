"""An unmodified Hugging Face model through the kernels: the same logits as with SDPA, and generation.

python examples/huggingface.py            # a small Llama with random weights; needs no download
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hopper_attention.integrations import huggingface


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("examples/huggingface.py: needs a CUDA GPU")
    huggingface.register()
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    tokens = torch.randint(32000, (2, 512), device="cuda")
    logits = {}
    for implementation in ("sdpa", "hopper_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(tokens).logits.float()
            text = model.generate(tokens[:, :64], max_new_tokens=32, do_sample=False)
        print(f"{implementation:18} first tokens generated: {text[0, 64:72].tolist()}")
    spread = (logits["sdpa"] - logits["hopper_attention"]).abs().max().item()
    print(
        f"largest difference of two logits {spread:.4f}, their size {logits['sdpa'].abs().max().item():.2f}"
    )


if __name__ == "__main__":
    main()
