"""Which thread holds what, and where a byte lies: fragments, the swizzle, the order of V's tokens in FP8."""

from harness.draw.canvas import Canvas
from harness.untraced import kernels
from hopper_attention.kernels.device.fp8 import TOKEN_ORDER, TOKENS

LANE_PAINTS = ("a", "b", "c", "d")  # of the four lanes that share a row


def place(row: int, column: int) -> tuple[int, int]:
    """(lane, register) that holds an element of a warp's 16 rows of an accumulator (PTX ISA, wgmma's D)."""
    lane = 4 * (row % 8) + column // 2 % 4
    return lane, column % 2 + 2 * (row // 8) + 4 * (column // 8)


def fragment() -> Canvas:
    """Two groups of 8 columns of the accumulator S, and the same as operand A of P·V."""
    picture = Canvas(
        474,
        "An accumulator fragment and operand A of the next product, by thread",
        "The 16 rows and 16 columns of S that a warp holds, coloured by the lane in its group of "
        "four: a lane "
        "has two neighbouring columns of every eight, in two rows. Operand A of 16 bits wants the "
        "same elements "
        "of the same lane in the same order, so that P is handed over by rounding pairs, without a shuffle.",
    )
    picture.text(
        16, 24, "S of one warp: fp32 accumulator of 16 rows × two groups of 8 columns (keys)", 14, bold=True
    )
    picture.legend(
        16, 48, [(paint, f"lanes {i}, {4 + i}, … {28 + i}") for i, paint in enumerate(LANE_PAINTS)]
    )
    left, top, wide, high = 116, 86, 40, 19
    for column in range(16):
        x = left + column * wide + (12 if column > 7 else 0)
        picture.text(x + wide / 2, top - 6, str(column), 11, "middle", "soft")
    rows = (0, 1, 2, 7, 8, 9, 10, 15)  # of 16: the others follow the same pattern
    for at, row in enumerate(rows):
        y = top + at * high + (8 if row > 7 else 0) + (8 if row in (7, 15) else 0)
        picture.text(left - 8, y + 14, f"row {row}", 11, "end", "soft")
        for column in range(16):
            lane, register = place(row, column)
            x = left + column * wide + (12 if column > 7 else 0)
            picture.rect(x, y, wide, high, LANE_PAINTS[lane % 4], "grid")
            picture.text(x + wide / 2, y + 14, f"{lane}:{register}", 11, "middle")
    y = top + 8 * high + 42
    picture.text(
        left,
        y - 6,
        "lane:register. The four lanes of a row give its maximum by two shuffles.",
        12,
        paint="soft",
    )
    y += 26
    picture.text(16, y, "Lane 0 hands over P for keys 0 to 15: k-step 0 of P·V", 14, bold=True)
    y += 14
    found = sorted(
        (place(row, column)[1], row, column)
        for row in (0, 8)
        for column in range(16)
        if place(row, column)[0] == 0
    )
    box = 76
    for register, row, column in found:
        picture.box(
            left + register * (box + 4), y, box, 34, [f"register {register}", f"({row}, {column})"], "a", 11
        )
    picture.text(left - 8, y + 21, "S, fp32", 12, "end")
    for word in range(len(found) // 2):
        x = left + 2 * word * (box + 4)
        for side in (box / 2, box * 1.5 + 4):
            picture.arrow([(x + side, y + 35), (x + box + 2 + (side - box - 2) * 0.5, y + 62)])
        (r0, row, c0), (_, _, c1) = found[2 * word], found[2 * word + 1]
        picture.box(
            x, y + 64, 2 * box + 4, 34, [f"word {r0 // 2}: row {row}, keys {c0}, {c1}", "two bf16"], "a2", 11
        )
    picture.text(left - 8, y + 85, "operand A", 12, "end")
    picture.text(
        left,
        y + 122,
        "Same thread, same elements, same order: only the type changes (operand_a renames the modes).",
        12,
    )
    return picture


def swizzle() -> Canvas:
    """Eight rows of 128 bytes, without and with the swizzle."""
    picture = Canvas(
        352,
        "The 128-byte swizzle",
        "Eight rows of eight 16-byte chunks in shared memory. Unswizzled, chunk 2 of all eight rows "
        "lies in the "
        "same four of 32 banks, and reading it takes eight turns. The swizzle keeps chunk c of row r "
        "at place c "
        "xor r, so that the eight chunks lie in all 32 banks and one turn is enough.",
    )
    moved = kernels("device.cuda_cores").swizzle
    shown = 2
    for half, (title, where) in enumerate((
        ("as it stands: 8 turns", lambda row, chunk: chunk),
        ("swizzled, place = chunk xor row: 1 turn", moved),
    )):  # fmt: skip
        left, top, wide, high = 62 + half * 388, 78, 41, 25
        picture.text(left, 24, title, 14, bold=True)
        picture.text(left, 46, f"eight lanes read chunk {shown} of eight rows", 12, paint="soft")
        for at in range(8):
            picture.text(left + at * wide + wide / 2, top - 8, str(at), 11, "middle", "soft")
        for row in range(8):
            picture.text(left - 8, top + row * high + 17, f"row {row}", 11, "end", "soft")
            for chunk in range(8):
                at = where(row, chunk)
                paint = "b2" if chunk == shown else "idle"
                picture.rect(left + at * wide, top + row * high, wide, high, paint, "grid")
                picture.text(
                    left + (at + 0.5) * wide,
                    top + row * high + 17,
                    str(chunk),
                    12,
                    "middle",
                    "ink" if chunk == shown else "soft",
                )
        y = top + 8 * high
        loads = [sum(where(row, shown) == at for row in range(8)) for at in range(8)]
        for at, n in enumerate(loads):
            picture.text(left + (at + 0.5) * wide, y + 18, f"{n}×" if n else "–", 12, "middle", bold=bool(n))
        picture.text(left, y + 40, "reads of each place (16 bytes: 4 of 32 banks)", 12, paint="soft")
    picture.text(
        16,
        346,
        "The number in a cell is the chunk that lies there. The pattern follows from address bits: regions "
        "start on 1024 bytes.",
        12,
    )
    return picture


def tokens() -> Canvas:
    """FP8: which tokens a thread's scores are of, and the order of V's tokens that makes them operand A."""
    picture = Canvas(
        340,
        "The order of V's tokens in FP8",
        "Of 16 keys lane t of a row's four holds the scores 2t, 2t + 1, 2t + 8 and 2t + 9; as "
        "operand A of an "
        "8-bit product it must hold four neighbours. V's tokens are stored in the order in which the "
        "lanes hold "
        "the scores, so that these four are neighbours of the product and nothing is shuffled.",
    )
    left, wide = 160, 38
    picture.text(16, 24, f"FP8: the order of V's tokens, of every {TOKENS} keys", 14, bold=True)
    picture.legend(16, 48, [(paint, f"lane {i} of a row's four") for i, paint in enumerate(LANE_PAINTS)])
    holder = [place(0, column)[0] for column in range(TOKENS)]
    rows = (
        (78, "scores, by key", "as they are computed", list(range(TOKENS))),
        (168, "operand A", "four neighbours a lane", list(TOKEN_ORDER)),
        (250, "V in memory", "Vt8: tokens in this order", list(TOKEN_ORDER)),
    )
    for y, title, words, order in rows:
        picture.text(left - 10, y + 13, title, 13, "end", bold=True)
        picture.text(left - 10, y + 29, words, 11, "end", "soft", room=left - 12)
        for at, key in enumerate(order):
            paint = LANE_PAINTS[holder[key]] if y < 250 else "h"
            picture.box(left + at * wide, y, wide, 32, str(key), paint, 13)
    for at, key in enumerate(TOKEN_ORDER):
        picture.line([(left + (key + 0.5) * wide, 111), (left + (at + 0.5) * wide, 167)], "line")
    for at in range(TOKENS):
        picture.line([(left + (at + 0.5) * wide, 201), (left + (at + 0.5) * wide, 249)], "grid", 1, "3 3")
    picture.text(left, 222, "k of the product: 0, 1, 2, …", 11, paint="soft")
    picture.text(left, 306, "A sum over keys does not mind their order, if P and V have the same one.", 12)
    picture.text(left, 326, "The kernel that quantises V writes it so; P is renamed, not moved.", 12)
    return picture
