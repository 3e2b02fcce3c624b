"""Compiled kernels on disk: whose they are, when an entry is one, and that nobody compiles twice."""

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import machine_code
from harness.results import repository
from hopper_attention import cache, launch, precompile
from hopper_attention.kernels.contract import Problem

PROBLEM = Problem.square(1, 1, 1, 64, False)
LINKER = any(map(shutil.which, ("cc", "gcc", "clang")))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's, and a process that has compiled nothing."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(launch, "_compiled", {})
    return tmp_path / "kernels"


def keep(
    key: str, folder: Path, machine_code: bytes = b"object", suffix: str = ".o", **description: object
) -> None:
    path = folder.parent / f"kernel{suffix}"
    path.write_bytes(machine_code)
    cache.store(key, path, b"cubin", **description)


@pytest.mark.parametrize("suffix", [".o", ".so"])
def test_an_entry_is_read_as_it_was_kept(suffix: str, own: Path) -> None:
    assert cache.load("a") is None
    keep("a", own, suffix=suffix, constants=[1, 2])
    entry = cache.load("a")
    assert entry.file == own / f"a{suffix}"
    assert (entry.file.read_bytes(), entry.cubin) == (b"object", b"cubin")
    assert entry.description == {"constants": [1, 2]}
    assert own.stat().st_mode & 0o777 == 0o700
    assert cache.load("b") is None


@pytest.mark.parametrize("suffix", [".o", ".cubin", ".json"])
@pytest.mark.parametrize("fault", ["missing", "empty", "cut", "changed"])
def test_what_is_not_whole_is_no_entry(suffix: str, fault: str, own: Path) -> None:
    keep("a", own)
    path = own / f"a{suffix}"
    content = path.read_bytes()
    spoilt = {
        "empty": b"",
        "cut": content[:-2],
        "changed": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:],
    }
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(spoilt[fault])
    assert cache.load("a") is None
    keep("a", own)
    assert cache.load("a") is not None


@pytest.mark.parametrize("text", ["null", "3", "[]", '"text"', "[" * 10**5, "{}", '{"suffix": 3}'])
def test_a_description_of_another_kind_is_no_entry(text: str, own: Path) -> None:
    keep("a", own)
    (own / "a.json").write_text(text)
    assert cache.load("a") is None


@pytest.mark.parametrize("suffix", [".o", ".cubin", ".json"])
def test_a_file_that_others_can_write_is_not_used(suffix: str, own: Path) -> None:
    """Nor is there one, whatever the umask: who changes code and digest alike would be run."""
    before = os.umask(0o000)
    try:
        keep("a", own)
    finally:
        os.umask(before)
    path = own / f"a{suffix}"
    assert path.stat().st_mode & 0o777 == cache.OWN and cache.load("a") is not None
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert cache.load("a") is None
    path.chmod(0o600)
    path.rename(own / "elsewhere")
    path.symlink_to(own / "elsewhere")
    assert cache.load("a") is None


def test_a_write_that_fails_leaves_the_entry_that_was(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("a", own, machine_code=b"first")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    keep("a", own, machine_code=b"other")
    assert cache.load("a").file.read_bytes() == b"first"
    assert sorted(path.name for path in own.iterdir()) == ["a.cubin", "a.json", "a.o"]


def test_a_folder_that_others_can_write_is_not_used(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.mkdir(mode=0o700)
    assert cache.folder() == own
    for mode in (0o770, 0o702, 0o777):
        own.chmod(mode)
        assert cache.folder() is None
    own.chmod(0o700)
    assert cache.folder() == own
    monkeypatch.setattr(os, "geteuid", lambda: own.stat().st_uid + 1)
    assert cache.folder() is None
    monkeypatch.undo()
    link = own.parent / "link"
    link.symlink_to(own)
    monkeypatch.setenv(cache.VARIABLE, str(link))
    assert cache.folder() is None


def test_without_a_folder_everything_works_but_the_keeping(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cache.VARIABLE, "")
    assert cache.folder() is None
    keep("a", own)
    assert cache.load("a") is None
    with cache.alone("a"):
        pass
    assert precompile.main(["k2"]) == 2
    assert "there is no folder to keep compiled kernels in" in capsys.readouterr().err


def test_a_folder_that_holds_no_lock_costs_only_the_lock(own: Path) -> None:
    """As on a disk that is read-only: the caller's own errors still come through."""
    (own / "a.lock").mkdir(parents=True)
    own.chmod(0o700)
    with pytest.raises(OSError, match="the caller's"), cache.alone("a"):
        raise OSError("the caller's")


def test_the_key_follows_sources_compiler_and_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "kernels"
    for path in cache.KERNELS.rglob("*.py"):
        target = copy / path.relative_to(cache.KERNELS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "KERNELS", copy)
    keys = [cache.key_of(file="k2", head_dim=64)]
    assert keys[0] == cache.key_of(head_dim=64, file="k2")
    keys.append(cache.key_of(file="k2", head_dim=128))
    (copy / "device" / "masks.py").write_text("# another word\n")
    keys.append(cache.key_of(file="k2", head_dim=64))
    monkeypatch.setattr(cache, "compiler_versions", lambda: {"nvidia-cutlass-dsl": "9.9"})
    keys.append(cache.key_of(file="k2", head_dim=64))
    monkeypatch.setattr(cache, "compiler_versions", lambda: {"nvidia-cutlass-dsl-libs-cu12": "9.9"})
    keys.append(cache.key_of(file="k2", head_dim=64))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_a_second_process_loads_what_the_first_compiled(
    suffix: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared library where there is a linker, else an object file."""
    if suffix == ".o":
        broken = own.parent / "broken"
        broken.mkdir()
        (broken / "cc").write_bytes(b"no program")
        (broken / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", str(broken))
    elif not LINKER:
        pytest.skip("there is no linker")
    first = launch.compile_stage("k2", PROBLEM)
    monkeypatch.setattr(launch, "_compiled", {})  # as a new process begins
    again = launch.compile_stage("k2", PROBLEM)
    assert again is not first
    assert machine_code.cubin_of(again) == machine_code.cubin_of(first)
    assert again.host_constants == first.host_constants
    assert type(again.launch) is not type(first.launch)  # from the file
    (about,) = own.glob("*.json")
    assert "/" not in about.read_text()  # another environment may load it, with libraries of its own
    (path,) = (path for path in own.iterdir() if path.suffix not in (".cubin", ".json", ".lock"))
    assert path.suffix == suffix
    for spoil in (lambda: path.write_bytes(b"no machine code"), lambda: keep(path.stem, own, suffix=suffix)):
        monkeypatch.setattr(launch, "_compiled", {})
        path.unlink()  # what is loaded is mapped: it must not be written
        spoil()
        spoilt = path.read_bytes()
        assert machine_code.cubin_of(launch.compile_stage("k2", PROBLEM)) == machine_code.cubin_of(first)
        assert path.read_bytes() != spoilt  # compiled anew


@pytest.mark.skipif(not LINKER, reason="there is no linker")
def test_what_is_cached_needs_no_compiler(own: Path) -> None:
    launch.compile_stage("k2", PROBLEM)
    code = """if True:
        import sys
        sys.modules["cutlass"] = None
        from hopper_attention import launch
        from hopper_attention.kernels.contract import Problem
        launch.kernel_for("k2", Problem.square(1, 1, 1, 64, False), {})
        assert "hopper_attention.kernels.k2" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], cwd=repository(), check=True, timeout=300)


def test_a_kernel_that_cannot_be_kept_serves_its_process(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(launch, "_export", fails)
    assert machine_code.cubin_of(launch.compile_stage("k2", PROBLEM))
    assert list(own.glob("*.json")) == []


def test_threads_compile_one_after_the_other(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL aborts the process when two threads compile at once."""
    inside, most, compiled = [], [], []

    def compile_or_load(*what: object) -> object:
        inside.append(what)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(what)
        compiled.append(what)
        return object()

    monkeypatch.setattr(launch, "_compile_or_load", compile_or_load)
    problems = [PROBLEM.with_(head_dim=d, causal=causal) for d in (64, 128) for causal in (False, True)]
    found: list[object] = []
    call = lambda problem: found.append((problem, launch.compile_stage("k2", problem)))
    threads = [threading.Thread(target=call, args=(problem,)) for problem in problems * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(compiled) == 4
    assert len({kernel for _, kernel in found}) == 4


def test_processes_compile_a_kernel_once(own: Path) -> None:
    code = """if True:
        from hopper_attention import cache, launch
        from hopper_attention.kernels.contract import Problem
        from hopper_attention.kernels import k2
        compile_kernel = k2.compile_kernel
        k2.compile_kernel = lambda *x, **y: print("compiles") or compile_kernel(*x, **y)
        kernel = launch.compile_stage("k2", Problem.square(1, 1, 1, 64, True))
        print(len(kernel.__cubin__))
    """
    run = [sys.executable, "-c", code]
    processes = [subprocess.Popen(run, cwd=repository(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(words.count("compiles") for words in out) == 1
    assert len({words[-1] for words in out}) == 1


def test_precompile_fills_the_cache(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [("k2", PROBLEM, {}), ("k2", PROBLEM, {"tile": 32}), ("k2", PROBLEM, {})]
    assert precompile.fill(jobs, workers=2) == 2
    assert len(list(own.glob("*.json"))) == 2
    assert precompile.main(["k99"]) == 2
    assert capsys.readouterr().err.startswith("hopper_attention.precompile: unknown stage 'k99'")


def test_what_could_not_be_written_is_no_success(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(precompile, "kernel_for", lambda *job: job)
    with pytest.raises(precompile.NotKept, match=f"1 of 1 kernels cannot be written to {own}"):
        precompile.fill([("k2", PROBLEM, {})])
    precompile.ahead([("k2", PROBLEM, {})])  # each is compiled when it is run
    assert precompile.main(["k1", "--head-dim", "64"]) == 2
    assert "kernels cannot be written to" in capsys.readouterr().err


def test_nothing_is_compiled_ahead_that_could_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[object] = []
    monkeypatch.setattr(precompile, "fill", filled.append)
    monkeypatch.setattr(cache, "folder", lambda: None)
    precompile.ahead(["a job"])
    assert not filled
    monkeypatch.setattr(cache, "folder", lambda: Path("somewhere"))
    precompile.ahead(["a job"])
    assert filled == [["a job"]]
