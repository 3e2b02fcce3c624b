"""Where a CTA's shared memory goes, and who owns what in bwd4."""

from harness.draw.canvas import WIDTH, Canvas
from harness.untraced import kernels
from hopper_attention.kernels.contract import Problem

KIB = 1024
HEAD_DIMS = (64, 128, 256)  # of those that are drawn


def maps() -> Canvas:
    """Shared memory by buffer, of the kernels' own byte counts."""
    constants = kernels("device.constants")
    rows: list[tuple[str, int, list[tuple[str, str, int]]]] = []  # (kernel, all bytes, buffers)
    k5 = kernels("k5")
    kernel = k5.FlashAttention2Specialised(128, False)
    tile = kernel.tile_kv * 128 * 2
    rows.append(
        (
            "k5, d = 128",
            kernel.smem_bytes,
            [
                ("Q", "a", kernel.tile_q * 128 * 2),
                (f"K ×{kernel.stages}", "b", kernel.stages * tile),
                (f"V ×{kernel.stages}", "c", kernel.stages * tile),
            ],
        )
    )
    k6 = kernels("k6")
    for d in HEAD_DIMS:
        kernel = k6.kernel_for(Problem.square(1, 1, 1024, d, False))
        queries, tile = kernel.tile_q * d * 2, kernel.tile_kv * d * 2
        names = {1: ["Q, O"], 2: ["Q, O", "Q, O"], 3: ["Q", "Q", "O"]}[kernel.q_and_o]
        rows.append(
            (
                f"k6, d = {d}",
                kernel.smem_bytes,
                [
                    *((name, "a" if "Q" in name else "d", queries) for name in names),
                    (f"K ×{kernel.stages}", "b", kernel.stages * tile),
                    (f"V ×{kernel.stages}", "c", kernel.stages * tile),
                ],
            )
        )
    k7 = kernels("k7")
    kernel = k7.FP8Forward(128, kernels("device.masks").Full(), "bfloat16")
    rows.append(
        (
            "k7, d = 128",
            kernel.smem_bytes,
            [
                (f"Q ×{kernel.q_stages}", "a", kernel.q_stages * kernel.tile_q * 128),
                ("O", "d", kernel.tile_q * 128 * 2),
                (f"K ×{kernel.stages}", "b", kernel.stages * kernel.tile_kv * 128),
                (f"Vᵀ and ones ×{kernel.stages}", "c", kernel.stages * kernel.tile_kv * kernel.columns),
            ],
        )
    )
    bwd4, operands = kernels("bwd4"), kernels("bwd4_operands")
    for d in HEAD_DIMS[:2]:
        kernel = bwd4.kernel_for(Problem.square(1, 1, 1024, d, False, direction="bwd")).main
        config = kernel.config
        q, kv = config.tile_q * d * 2, operands.TILE_KV * d * 2
        rows.append(
            (
                f"bwd4, d = {d}",
                kernel.smem_bytes,
                [
                    (f"K ×{config.k_stages}", "b", config.k_stages * kv),
                    ("V", "c", kv),
                    (f"Q ×{config.stages}", "a", config.stages * q),
                    (f"dO ×{config.stages}", "d", config.stages * q),
                    ("dS ×2", "e", 2 * operands.TILE_KV * config.tile_q * 2),
                    ("dQ", "g", operands.TILE_KV * 64 * 4),
                ],
            )
        )
    decode = kernels("decode")
    kernel = decode.Decode(128, "bfloat16", 16)
    half = kernel.stages * kernel.stage_bytes // 2
    rows.append(
        (
            "decode, d = 128",
            kernel.stages * kernel.stage_bytes + kernel.other_bytes,
            [
                (f"K ×{kernel.stages}", "b", half),
                (f"V ×{kernel.stages}", "c", half),
                ("Q, merging", "h", kernel.other_bytes),
            ],
        )
    )
    left, high, scale = 120, 40, 640 / constants.SMEM_MAX
    picture = Canvas(
        96 + len(rows) * high,
        "Shared memory of the kernels, by buffer",
        "Bars of the bytes that a CTA of k5, k6, k7, bwd4 and decode keeps in shared memory, by "
        "buffer, up to the "
        "227 KiB that a CTA may have.",
    )
    picture.text(16, 24, "Shared memory of one CTA, by buffer, in KiB", 14, bold=True)
    picture.text(
        16,
        45,
        "×n: stages of a ring. Barriers, statistics and alignment are the thin end of a bar.",
        12,
        paint="soft",
    )
    y = 62
    for name, total, buffers in rows:
        picture.text(left - 10, y + 20, name, 12, "end")
        picture.rect(left, y, constants.SMEM_MAX * scale, high - 10, "idle")
        x = float(left)
        for words, paint, size in buffers:
            w = size * scale
            picture.rect(x, y, w, high - 10, paint, "line")
            full = f"{words}: {size / KIB:g}"
            picture.text(x + w / 2, y + 19, full if w > 76 else words, 11, "middle", room=w)
            x += w
        rest = total - sum(size for _, _, size in buffers)
        assert 0 <= rest < 5 * KIB, (name, rest)
        picture.rect(x, y, max(1.0, rest * scale), high - 10, "h")
        assert total <= constants.SMEM_MAX
        y += high
    end = left + constants.SMEM_MAX * scale
    picture.line([(end, 54), (end, y - 4)], "ink", 1.5)
    picture.text(end, y + 14, f"{constants.SMEM_MAX // KIB} KiB: all that a CTA may have", 12, "end")
    return picture


def bwd4() -> Canvas:
    """The warps of bwd4 at head_dim 128, what they own, and where they meet."""
    bwd, operands, tiles = kernels("bwd4"), kernels("bwd4_operands"), kernels("device.key_tiles")
    adders = kernels("device.dq_sums")
    d, config, B = 128, operands.CONFIGS[128], bwd.Barrier
    kib = lambda size: f"{size // KIB} KiB"
    q, kv = config.tile_q * d * 2, operands.TILE_KV * d * 2
    warps = tiles.CONSUMER_WARPS
    picture = Canvas(
        650,
        "Who owns what in bwd4, and the barriers between them",
        "The twelve warps of a CTA of bwd4 at head_dim 128. One loads, two warpgroups multiply and "
        "keep dK and dV "
        "of 64 keys each in registers, two warps add dQ to its sum in L2 by bulk reduction, one "
        "writes zeros. "
        "Between them stand shared memory and its barriers.",
    )
    picture.text(
        16,
        24,
        f"One CTA of bwd4 at head_dim {d}: {operands.TILE_KV} keys stay, tiles of {config.tile_q} "
        f"queries pass by",
        14,
        bold=True,
    )
    picture.box(
        16,
        50,
        150,
        76,
        [f"warp {warps}: loads", "K, V once a tile;", "Q, dO, LSE, D each step", "TMA"],
        "f",
        11,
        True,
    )
    x, w = 262, 176
    buffers = (
        (50, "Q", f"{config.stages} stages, {kib(config.stages * q)}, LSE and D", "a"),
        (92, "dO", f"{config.stages} stages, {kib(config.stages * q)}", "a"),
        (134, "K", f"{config.k_stages} stages, {kib(config.k_stages * kv)}", "b"),
        (176, "V", f"1 stage, {kib(kv)}", "b"),
        (270, "dS", f"2 × 2 consumers, {kib(2 * operands.TILE_KV * config.tile_q * 2)}", "e"),
        (420, "dQ of a step", f"fp32, a part each, {kib(operands.TILE_KV * 64 * 4)}", "g"),
    )
    for y, name, words, paint in buffers:
        picture.box(x, y, w, 38, [name, words], paint, 11, True)
    picture.text(x + w / 2, 42, "shared memory", 12, "middle", "soft")
    for y in (69, 111, 153, 195):
        picture.arrow([(166, min(max(y, 60), 118)), (x, y)])
    picture.text(16, 146, "full: 1 arrival and the bytes", 11, paint="soft")
    picture.text(16, 162, f"empty: {warps} arrivals, a lane", 11, paint="soft")
    picture.text(16, 178, "of each consumer warp", 11, paint="soft")
    for c in range(tiles.CONSUMERS):
        y = 50 + c * 282
        keys = f"keys {c * tiles.ROWS} to {(c + 1) * tiles.ROWS - 1}"
        lines = [
            f"consumer {c}: warps {4 * c} to {4 * c + 3}", keys, "registers, fp32 each thread:",
            "dK 64, dV 64, all the time", "Sᵀ 32, dPᵀ 32, then dQ 32", "", "Sᵀ = K·Qᵀ, P = exp2(…)",
            "dV += Pᵀ·dO", "dPᵀ = V·dOᵀ, dS = P∘(dPᵀ − D)", "dK += dSᵀ·Q", "dQ = dS·K: 64 columns",
        ]  # fmt: skip
        picture.box(574, y, 210, 190, lines, "c" if c == 0 else "d", 11.5, True)
    for top in (69, 111, 153, 195, 290):
        picture.line([(438, top), (506, top)], dash="4 3")
    picture.line([(506, 69), (506, 360)], dash="4 3")
    picture.arrow([(506, 100), (574, 100)], dash="4 3")
    picture.arrow([(506, 360), (574, 360)], dash="4 3")
    picture.text(444, 62, "WGMMA", 11, paint="soft")
    both = f"{tiles.BOTH} threads"
    picture.box(
        582,
        246,
        196,
        80,
        [
            f"TURN {B.TURN} + c: dK, dQ, next Sᵀ",
            f"DS_READY {B.DS_READY} + c + 2·parity",
            f"K_READ {B.K_READ}",
            both,
        ],
        "idle",
        11,
    )
    picture.arrow([(680, 240), (680, 246)])
    picture.arrow([(680, 332), (680, 326)])
    picture.arrow([(574, 214), (540, 214), (540, 282), (438, 282)])
    picture.arrow([(574, 400), (540, 400), (540, 298), (438, 298)])
    picture.text(444, 276, "stmatrix", 11, paint="soft")
    picture.arrow([(574, 226), (524, 226), (524, 430), (438, 430)])
    picture.arrow([(574, 446), (438, 446)])
    picture.text(444, 464, "st.shared, fence", 11, paint="soft")
    y = 404
    picture.box(
        16,
        y,
        150,
        74,
        [
            f"warps {warps + 1}, {warps + 2}: add",
            "every other step each",
            "cp.reduce.async.bulk",
            f"{adders.AND_ADDER} threads",
        ],
        "f",
        11,
        True,
    )
    picture.arrow([(262, 432), (166, 432)])
    picture.arrow([(166, 452), (262, 452)])
    picture.text(214, 425, "DQ_FULL", 11, "middle", "soft")
    picture.text(214, 468, "DQ_EMPTY", 11, "middle", "soft")
    picture.text(170, 484, f"{B.DQ_FULL} + c + 2·adder, {B.DQ_EMPTY} + c", 11, paint="soft")
    picture.box(16, 546, 150, 40, ["dQ's sums in L2", "fp32: dQ before rounding"], "h", 11, True)
    picture.arrow([(91, 478), (91, 546)])
    picture.box(
        262, 546, 176, 40, [f"warp {warps + 3}: writes zeros", "of the next section's sums"], "f", 11, True
    )
    picture.arrow([(262, 566), (166, 566)])
    picture.box(574, 560, 210, 40, ["dV over its K, dK over its dQ", "then TMA to global memory"], "h", 11)
    picture.arrow([(680, 522), (680, 560)])
    picture.text(
        16,
        616,
        "Numbers are those of the named barriers; c is the consumer. bwd4_det has no zero writer, "
        "and its adders wait for",
        12,
    )
    picture.text(16, 634, "the tile's turn in global memory.", 12)
    assert WIDTH == 800
    return picture
