"""cuDNN's FP8 forward, through its Python front end (the package nvidia-cudnn-frontend)."""

import math
from collections.abc import Callable

import torch

from hopper_attention.kernels.contract import Problem

P_SCALE = 448.0  # of P before it is rounded: it is at most 1, and e4m3 holds this


def version() -> str:
    """Of the library and of its front end. Raises ImportError where the front end is not installed."""
    import cudnn

    library = cudnn.backend_version()
    return f"{library // 10000}.{library // 100 % 100}.{library % 100}, front end {cudnn.__version__}"


def forward(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: dict[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A call that returns o (B, H, Nq, d) in the problem's dtype, or where cuDNN has no such kernel in e4m3.

    q, k, v are e4m3 (B, H, N, d), rows before heads in memory or after; `descales` by the names q, k, v, one
    number each. Raises what the front end raises where no kernel takes the problem.
    """
    reason = None
    for out in (getattr(torch, problem.dtype), torch.float8_e4m3fn):
        try:
            return _built(problem, q, k, v, descales, out)
        except Exception as error:  # the front end's classes differ by version
            reason = reason or error
    raise reason


def _built(problem, q, k, v, descales, out: torch.dtype) -> Callable[[], torch.Tensor]:
    import cudnn

    types = {
        torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
        torch.float32: cudnn.data_type.FLOAT,
    }
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=types[torch.float8_e4m3fn],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    one = lambda value: torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {f"descale_{name}": one(value.item()) for name, value in descales.items()}
    tensors |= {"descale_s": one(1 / P_SCALE), "scale_s": one(P_SCALE), "scale_o": one(1.0)}
    nodes = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types[x.dtype])
        for name, x in tensors.items()
    }
    mask = {}
    if problem.causal:
        top_left = problem.top_left or problem.seqlen_q == problem.seqlen_kv
        corners = cudnn.diagonal_alignment
        mask = {
            "diagonal_alignment": corners.TOP_LEFT if top_left else corners.BOTTOM_RIGHT,
            "right_bound": 0,
        }
    o_node, _, *amax = graph.sdpa_fp8(
        **nodes, attn_scale=1.0 / math.sqrt(problem.head_dim), generate_stats=False, **mask
    )
    o = torch.empty_like(q, dtype=out)
    o_node.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride())).set_data_type(types[out])
    found = [(o_node, o)]
    for node in amax:
        x = one(0.0)
        node.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(types[x.dtype])
        found.append((node, x))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    pack = {nodes[name]: x for name, x in tensors.items()} | dict(found)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def call() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, workspace, handle=handle)
        return o

    call()  # so that what cannot run says so now
    return call
