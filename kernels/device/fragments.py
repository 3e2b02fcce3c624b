"""What the main loops of bwd4 hand around: products of the tensor cores with their operands, and where in its
tile each element of an accumulator lies.

All are frozen dataclasses of things that are bound once. That is more than style. The DSL traces a dynamic
loop or branch by carrying every variable that its body writes or calls a method of, and rebinds the carried
ones: a bag whose members it rebinds comes back holding values of another region, and the compiler says later,
somewhere else, that an operand does not dominate its use (notes/gotchas.md, "`TiledMma.set` inside a
helper"). A frozen dataclass it only reads. What does change in a loop, such as the state of a ring, must
therefore be a variable of its own and never a field.
"""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from .rows import coordinates as places
from .wgmma import multiply


@dataclass(frozen=True)
class Product:
    """acc (+)= A·B, of one warpgroup.

    Operands in shared memory are descriptors, 64 bits in registers that say where WGMMA is to read; stage,
    consumer and the like are their last mode.
    """

    mma: cute.TiledMma
    acc: cute.Tensor  # registers, ((2, 2, N/8), MMA_M, MMA_N) fp32
    A: cute.Tensor  # (MMA, MMA_M, MMA_K), registers or a descriptor; or with a last mode
    B: cute.Tensor  # (MMA, MMA_N, MMA_K, last mode), descriptors

    def of(self, a: object, b: object) -> "Product":
        """The product of the `a`-th A, or of A if `a` is None, and the `b`-th B."""
        tA = self.A if a is None else self.A[None, None, None, a]
        return replace(self, A=tA, B=self.B[None, None, None, b])

    def issue(self, accumulate: bool) -> None:
        """Issue the product as one commit group; it has operands without a last mode."""
        multiply(self.mma, self.acc, self.A, self.B, accumulate)

    def begin_with(self, first: "Product | None", b: object) -> None:
        """Issue the product, as one commit group; with a `first`, one of the same accumulator and a single A,
        it is added to that of the `b`-th B."""
        self.issue(False) if first is None else _issue_sum(first.of(None, b), self)

    def end_with(self, last: "Product | None", b: object) -> None:
        """`begin_with`, but what may be added comes behind."""
        self.issue(False) if last is None else _issue_sum(self, last.of(None, b))


def _issue_sum(*products: Product) -> None:
    """Issue products of one accumulator, which becomes their sum, as one commit group."""
    warpgroup.fence()
    for i, product in enumerate(products):
        atom = cute.make_mma_atom(product.mma.op)  # its own, as in `multiply`
        for k in range(cute.size(product.B, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0 or k > 0)
            tA, tB = product.A[None, None, k], product.B[None, None, k]
            cute.gemm(atom, product.acc, tA, tB, product.acc)
    warpgroup.commit_group()


@dataclass(frozen=True)
class Coordinates:
    """The coordinates in its tile, a pair, of each accumulator element that a thread holds; (row, column) as
    `by_row` orders them.

    Every thread of a warpgroup holds the same pattern of elements, shifted: own[r, c] = own[0, 0] +
    first[r, c]. A mask needs both. A column's limit is compared, once the thread's own shift is subtracted
    from it, with `first`, which makes one instruction with an immediate per element; with `own` alone each
    column would be an addition and a register more.
    """

    own: cute.Tensor  # this thread's: known at run time
    first: cute.Tensor  # thread 0's: compile-time constants


def coordinates(mma: cute.TiledMma, shape: tuple[int, int], thread: object) -> Coordinates:
    """Where the elements of an accumulator of `shape` lie that a thread of the warpgroup holds."""
    return Coordinates(*places(mma, *shape, thread))
