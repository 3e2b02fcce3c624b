"""`context_parallel`'s messages by a process group's own communicator."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class Exchange:
    """Messages of one call among a group's ranks. Each rank posts them in the same order."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def post(
        self, kind: str, to: int, sent: list[torch.Tensor], source: int, shapes: list[torch.Size]
    ) -> Callable[[], list[torch.Tensor]]:
        """Send contiguous tensors and receive some of these shapes and of the same type, behind what the
        current stream holds now. The result makes the then current stream wait, and returns what was
        received: valid until the next but one post of its `kind`."""
        received = [sent[0].new_empty(shape) for shape in shapes]
        there, here = (dist.get_global_rank(self.group, rank) for rank in (to, source))
        messages = [dist.P2POp(dist.isend, x, there, self.group) for x in sent]
        messages += [dist.P2POp(dist.irecv, x, here, self.group) for x in received]
        works = dist.batch_isend_irecv(messages)

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            del sent[:]  # until now: nothing else keeps what is being sent
            return received

        return wait

    def finish(self) -> None:
        """What was sent may be overwritten behind what the current stream then holds. Who has waited for all
        messages knows that of these."""
