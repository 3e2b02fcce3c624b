"""The figure of notes/k8.md: what a rotation does to codes, the reference's, without a GPU."""

from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from harness import accuracy, plots, quantized
from hopper_attention import production_fp8
from hopper_attention.kernels.contract import Problem

PROBLEM = Problem.square(1, 4, 2048, 128, False)
OUTLIER = 6.0  # beyond which an element of N(0, 1) + N(0, 100)·Bernoulli(0.001) is one of the few
BINADES = range(-10, 9)  # e4m3's: subnormal codes are those below 2⁻⁶, zero is put with the smallest
SHARES = 20  # bins


class Spread(NamedTuple):
    """Of one way to quantise, in per cent."""

    codes: list[float]  # of K's, by BINADES
    products: list[float]  # of scores whose outliers meet, by the share of their largest product, in SHARES


def spreads() -> dict[str, Spread]:
    """Before and after the rotation, on the inputs of FlashAttention-3's Table 3."""
    q, k, v = accuracy.rare_outliers(PROBLEM, torch.Generator().manual_seed(0))
    meet = [(x.float().abs() > OUTLIER).float() for x in (q, k)]
    where = (meet[0] @ meet[1].mT > 0).nonzero().unbind(-1)  # batch, head, query, key
    signs = production_fp8.signs(PROBLEM.head_dim)
    found = {}
    for name, rotate in (("as they are", False), ("rotated", True)):
        made = quantized.quantize_reference(q, k, v, rotate=rotate, signs=signs)
        q_back, k_back, _ = made.dequantized
        products = (q_back[where[0], where[1], where[2]] * k_back[where[0], where[1], where[3]]).abs()
        shares = products.amax(-1) / products.sum(-1)
        binades = made.k8.float().abs().clamp(min=2.0 ** BINADES[0]).log2().floor()
        found[name] = Spread(
            [100 * (binades == binade).float().mean().item() for binade in BINADES],
            (100 * torch.histc(shares, SHARES, 0, 1) / shares.numel()).tolist(),
        )
    return found


def plot_rotation(path: Path | str) -> None:
    """Draw `spreads`: a panel of codes, a panel of products."""
    with plots.style():
        figure = Figure(figsize=(10, 3.6))
        of_codes, of_products = figure.subplots(1, 2)
        colours = plots.OTHER_COLOUR, plots.STAGE_COLOUR
        for (name, spread), colour in zip(spreads().items(), colours):
            edges = [2.0**binade for binade in (*BINADES, BINADES[-1] + 1)]
            of_codes.stairs(spread.codes, edges, color=colour, linewidth=1.6, label=name)
            edges = [100 * i / SHARES for i in range(SHARES + 1)]
            of_products.stairs(spread.products, edges, color=colour, linewidth=1.6, label=name)
        of_codes.set_xscale("log", base=2)
        of_codes.axvline(2.0**-6, color=plots.MUTED, linewidth=0.8)
        top = of_codes.get_ylim()[1]
        of_codes.text(2.0**-6.1, top, "subnormal ", ha="right", va="top", color=plots.MUTED)
        of_codes.set_title("|codes of K|, % of all in each binade", fontsize=9, loc="left")
        title = "scores whose outliers meet, %, by the share of their largest product, %"
        of_products.set_title(title, fontsize=9, loc="left")
        of_products.legend(loc="upper right")
        what = f"N(0, 1) + N(0, 100)·Bernoulli(0.001), head_dim {PROBLEM.head_dim}"
        plots.heading(figure, "Codes and products, rotated and not", what)
        figure.subplots_adjust(left=0.04, right=0.985, bottom=0.08, top=0.78, wspace=0.1)
        plots.save(figure, path)
