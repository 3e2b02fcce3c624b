"""Logits of unmodified Hugging Face models, with these kernels beside PyTorch's SDPA, at 200 positions.

    python -m harness.logits            compute and print
    python -m harness.logits --save     and write results/<gpu>/library/logits.json

Models have random weights in bf16. What each position sees are SDPA's tokens: token by token it continues a
prompt by sampling (BERT, which does not generate, is given random ones). Both compute the logits of every
position in one pass, and token by token. With transformers' own cache steps behind the prompt go to SDPA
(`hopper_attention.choice`); with `KeyValueCache` the decoding kernel takes them. Errors are from the same
weights and tokens in float32. Where SDPA's first token is ahead of its second by more than its own largest
error, both must name the same.
"""

import sys
from typing import Any

import torch

from harness import row_files, timing
from harness.command import run, saving

POSITIONS, PROMPT, BATCH, VOCABULARY = 200, 8, 2, 5000
LAYERS, HEADS, HIDDEN = 4, 12, 768
DEVICE = "cuda"
MODELS = "Llama", "GPT-2", "BERT"
IN_ONE_PASS, BY_TOKEN, BY_DECODE = "in one pass", "token by token", "token by token, KeyValueCache"
SPREAD = 1.5  # times SDPA's largest error ours may be


def model_of(name: str) -> torch.nn.Module:
    """As transformers makes it, of head_dim 64: Llama's query heads share key heads."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 2048, "num_attention_heads": HEADS}
    shape |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    config = {
        "Llama": transformers.LlamaConfig(**shape, num_key_value_heads=4),
        "GPT-2": transformers.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY),
        "BERT": transformers.BertConfig(**shape),
    }[name]
    kind = transformers.AutoModelForMaskedLM if name == "BERT" else transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()


def by_token(
    model: torch.nn.Module, tokens: torch.Tensor, past: object = None, sample: bool = False
) -> torch.Tensor:
    """Logits of a prompt and of every step behind it, with transformers' cache or another. With `sample`
    tokens behind the prompt are drawn here, and written."""
    found = model(tokens[:, :PROMPT], past_key_values=past, use_cache=True)
    steps = [found.logits]
    for i in range(PROMPT, tokens.shape[1]):
        if sample:
            tokens[:, i] = steps[-1][:, -1].float().softmax(-1).multinomial(1)[:, 0]
        found = model(tokens[:, i : i + 1], past_key_values=found.past_key_values, use_cache=True)
        steps.append(found.logits)
    return torch.cat(steps, 1).float()


@torch.no_grad()
def measure(name: str) -> list[dict[str, Any]]:
    """A row for each way through a model."""
    from hopper_attention.integrations import huggingface
    from hopper_attention.integrations.huggingface_cache import KeyValueCache

    huggingface.register()
    model = model_of(name)
    tokens = torch.randint(VOCABULARY, (BATCH, POSITIONS), device=DEVICE)
    generates = name != "BERT"
    theirs, ours = {}, {}
    for implementation, found in (("sdpa", theirs), (huggingface.NAME, ours)):
        model.set_attn_implementation(implementation)
        if generates:
            found[BY_TOKEN] = by_token(model, tokens, sample=found is theirs)
        found[IN_ONE_PASS] = model(tokens).logits.float()
    if generates:
        ours[BY_DECODE] = by_token(model, tokens, KeyValueCache(model, POSITIONS))
        theirs[BY_DECODE] = theirs[BY_TOKEN]
    model.float().set_attn_implementation("eager")
    exact = model(tokens).logits
    return [{"model": name, "way": way} | beside(theirs[way], x, exact) for way, x in ours.items()]


def beside(theirs: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """Largest and mean errors of both, at how many positions SDPA is sure of a token, and at how many of
    these ours is the same."""
    errors = [(x - exact).abs() for x in (theirs, ours)]
    first, second = theirs.topk(2).values.unbind(-1)
    sure = first - second > errors[0].max()
    same = sure & (ours.argmax(-1) == theirs.argmax(-1))
    return {
        "positions": sure.numel(), "sure": int(sure.sum()), "same": int(same.sum()),
        "sdpa_error": errors[0].max().item(), "our_error": errors[1].max().item(),
        "sdpa_mean_error": errors[0].mean().item(), "our_mean_error": errors[1].mean().item(),
    }  # fmt: skip


def failures(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row."""
    wrong = []
    if not row["our_error"] <= SPREAD * row["sdpa_error"]:
        wrong.append(f"error {row['our_error']:.3g}, SDPA's {row['sdpa_error']:.3g}")
    if not 0 < row["sure"] == row["same"]:
        wrong.append(f"{row['same']} of the {row['sure']} tokens that SDPA is sure of")
    return [f"{row['model']}, {row['way']}: {x}" for x in wrong]


def measured(arguments: list[str] | None) -> bool:
    save = saving("logits", __doc__, arguments)
    rows = [row for name in MODELS for row in measure(name)]
    for row in rows:
        print(
            f"{row['model']:6} {row['way']:30} largest error {row['our_error']:.4f}, "
            f"SDPA {row['sdpa_error']:.4f}; mean {row['our_mean_error']:.2e}, {row['sdpa_mean_error']:.2e}; "
            f"same token at {row['same']} of {row['sure']} of {row['positions']}"
        )
    wrong = [x for row in rows for x in failures(row)]
    for x in wrong:
        print(f"FAILED {x}")
    if save and not wrong:
        print(f"wrote {row_files.save('logits', rows, timing.environment({}))}")
    return not wrong


def main(arguments: list[str] | None = None) -> int:
    return run("harness.logits", lambda: measured(arguments))


if __name__ == "__main__":
    sys.exit(main())
