"""Where tiles of keys begin that begin apart: at positions that they are spread over evenly, those that are
fetched first at the last ones. What the kernels whose tiles take turns (`dq_sums`) and the simulation of who
waits (hopper_attention/turns.py) both compute; imports no compiler."""

ROUNDS_APART = 2  # tiles of keys for each SM, with more of which most begin when others are done


def begins_at(nth, tiles, positions):
    """The position that the nth of so many tiles begins with."""
    return (tiles - 1 - nth) * positions // tiles


def begin_behind(position, tiles, positions):
    """How many of them begin behind a position: they are the first."""
    return tiles - ((position + 1) * tiles + positions - 1) // positions
