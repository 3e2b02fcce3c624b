"""Compiled kernels on disk: what names an entry, who may write it, and how two processes share it.

Standard library only. What is loaded from here runs in the caller's process, so a folder and its files are
used only if their owner is the user and nobody else can write them; there is no fallback to a shared place.
An entry is the host code with its cubin, as a shared library or as an object, that cubin by itself, and a
description, each written whole or not at all.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "HOPPER_ATTENTION_CACHE"  # names the folder; empty: no cache
OWN = 0o600  # of a file: whatever the umask, nobody else writes what is run from here
COMPILER = "nvidia-cutlass-dsl"  # and its libraries, nvidia-cutlass-dsl-libs-…
KERNELS = Path(__file__).resolve().parent / "kernels"


class Entry(NamedTuple):
    """A compiled kernel as the cache keeps it."""

    file: Path  # the host code with its cubin: a shared library, or an object
    cubin: bytes
    description: dict[str, Any]


def folder() -> Path | None:
    """The user's own folder of compiled kernels, created if need be; None where there can be none.

    `HOPPER_ATTENTION_CACHE`, or hopper_attention in `XDG_CACHE_HOME`, by default ~/.cache.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    try:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hopper_attention")
        path = (Path(named).expanduser() if named else default).absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path if is_private(path) else None
    except (OSError, RuntimeError):  # a read-only disk, or a user without a home: compiling still works
        return None


def is_private(path: Path) -> bool:
    """Whether `path` is a folder of the user's own, not a link, that nobody else can write."""
    return stat.S_ISDIR(path.lstat().st_mode) and _is_own(path)


def _is_own(path: Path) -> bool:
    """Whether `path` is the user's own, not a link, and nobody else can write it."""
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


@functools.cache  # 50 ms, of which a first call has few
def compiler_versions() -> dict[str, str]:
    """Every installed distribution of the DSL by its name: they can be upgraded one without the other. Of two
    copies the first on the path counts, which is the one that Python imports."""
    found: dict[str, str] = {}
    for x in importlib.metadata.distributions():
        name = (x.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(COMPILER):
            found.setdefault(name, x.version or "unknown")
    return dict(sorted(found.items()))


def compiler() -> dict[str, list[str]]:
    """What of the DSL the machine code follows from: all versions among its distributions, and the CUDA that
    its libraries are for, of several the newest."""
    found = compiler_versions()
    cuda = [name.rpartition("-cu")[2] for name in found if "-libs-cu" in name]
    return {"versions": sorted(set(found.values())), "cuda": sorted(cuda)[-1:]}


def sources() -> str:
    """The sha256 of every kernel source, path and bytes."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.rglob("*.py")):
        digest.update(f"{path.relative_to(KERNELS)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(**what: str | int | bool) -> str:
    """The name of the entry for `what` is compiled, of these sources by this compiler."""
    everything = {"what": what, "sources": sources(), "compiler": compiler()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def alone(key: str) -> Iterator[None]:
    """While this runs, no other process is inside for the same key: one compiles, the others then load."""
    with contextlib.ExitStack() as held:  # a process that is killed gives its lock back
        with contextlib.suppress(OSError):  # a folder that cannot be written, or a disk without locks
            if path := folder():
                file = held.enter_context(open(path / f"{key}.lock", "ab"))
                held.enter_context(locked(file.fileno()))
        yield


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """While this runs, no other process has locked the file or folder that is open here. Raises OSError on a
    disk without locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # which a forked child would go on holding


def load(key: str) -> Entry | None:
    """The entry of this name; None for one that is not there, not whole, or that others can write."""
    if (path := folder()) is None:
        return None
    try:
        description = dict(json.loads((path / f"{key}.json").read_text()))
        cubin, file = (path / f"{key}.cubin").read_bytes(), path / f"{key}{description.pop('suffix')}"
        digests = {"cubin": _sha256(cubin), "file": _sha256(file.read_bytes())}
        own = all(_is_own(x) for x in (path / f"{key}.json", path / f"{key}.cubin", file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Entry(file, cubin, description) if own and description.pop("sha256", None) == digests else None


def store(key: str, host_code: Path, cubin: bytes, **description: Any) -> None:
    """Keep a compiled kernel. The description comes last: without it there is no entry."""
    if (path := folder()) is None:
        return
    machine_code = host_code.read_bytes()
    description |= {
        "suffix": host_code.suffix,
        "sha256": {"cubin": _sha256(cubin), "file": _sha256(machine_code)},
    }
    text = json.dumps(description, sort_keys=True).encode()
    with contextlib.suppress(OSError):  # a full disk costs the next process a compile, and this one nothing
        for suffix, content in ((host_code.suffix, machine_code), (".cubin", cubin), (".json", text)):
            write_atomically(path / f"{key}{suffix}", content, OWN)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file in one step, creating its folder: a reader finds the old content or the new. `mode` is
    what the umask leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since os.replace may not leave a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
