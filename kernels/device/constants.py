"""Numbers of the hardware and of its number formats that every kernel file uses."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
VECTOR = 8  # 16-bit elements in one 16-byte access, the widest a thread can make
WARP = 32
WARPGROUP = 128  # four warps that issue a WGMMA together
GRID_YZ_MAX = 65535  # CUDA's limit on gridDim.y and gridDim.z
ROWS_MAX = 2**31 - 1  # row indices are 32-bit; addresses are 64-bit
# CTAs that stay. On a smaller chip some start late and find less left to fetch; where one waits for another, it
# is for an earlier tile, fetched by one at work.
SMS = 132
SMEM_MAX = 232448  # bytes a CTA may have on Hopper; 1 KiB of it is left to the barriers
