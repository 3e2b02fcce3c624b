"""Numbers of the hardware and of its number formats that every kernel file uses."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
VECTOR = 8  # 16-bit elements in one 16-byte access, the widest a thread can make
WARP = 32
WARPGROUP = 128  # four warps that issue a WGMMA together
GRID_YZ_MAX = 65535  # CUDA's limit on gridDim.y and gridDim.z
ROWS_MAX = 2**31 - 1  # row indices are 32-bit; addresses are 64-bit
SMS = 132  # of an H100 SXM, H200 or GH200: for so many a kernel whose CTAs stay is compiled, unless told
SMEM_MAX = 232448  # bytes a CTA may have on Hopper
