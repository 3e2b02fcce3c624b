"""Every command of the README and the notes: which test runs it, or gives it to its parser."""

import os
import re
import shlex
import subprocess

import pytest
from running import ROOT

import bench

README = ROOT / "README.md"
READ = [README, *sorted((ROOT / "notes").glob("*.md"))]  # the list of commands is in notes/measuring.md
COMMAND = re.compile(r"(?:[A-Z_]+=\S+\s+)*(?:python3?|make)\s")
# How each command a reader is told to type is tested.
RUN_HERE = "a test of test_commands.py runs it"
PARSED = "long: test_long_commands_are_understood gives it to its parser"
EXPANDED = "test_make_runs_the_right_program reads what it would run"
ELSEWHERE = "another file's tests call its main"
ITSELF = "it runs these tests"
TESTED = {
    "python bench.py k2": RUN_HERE,
    "python bench.py k2 --seqlen 512 --head-dim 64 --causal 0": RUN_HERE,
    "CHECK=1 SEQLEN=512 HEADDIM=64 CAUSAL=0 python bench.py k1": RUN_HERE,
    "python ref_check.py k2": RUN_HERE,
    "python bench.py all": PARSED,
    "python bench.py all --save": PARSED,
    "python bench.py k1 fa1 k2": PARSED,
    "python bench.py k3": PARSED,
    "python bench.py k7 k7_rows k8": PARSED,
    "python bench.py bwd4 bwd4_det": PARSED,
    "python bench.py k6 bwd4 --head-dim 256": PARSED,
    "python bench.py k2 --save": PARSED,
    "python ref_check.py --mutations": RUN_HERE,
    "python ref_check.py k2 --save": RUN_HERE,
    "python -m harness.records": ELSEWHERE,
    "python bench.py k6 bwd4 --suite models": PARSED,
    "python bench.py k6 bwd4 --suite packed": PARSED,
    "python bench.py k6 bwd4 --suite window": PARSED,
    "python bench.py k6 --suite few": PARSED,
    "python bench.py decode": ELSEWHERE,
    "python -m harness.decoding_fuzz": ELSEWHERE,
    "python -m harness.host": ELSEWHERE,
    "python -m harness.logits": ELSEWHERE,
    "python -m harness.accuracy": ELSEWHERE,
    "python -m harness.quantizing": ELSEWHERE,
    "python -m harness.ablation fa1": RUN_HERE,
    "python -m harness.report": ELSEWHERE,
    "python -m harness.draw": ELSEWHERE,
    "python -m harness.diff k2 k3_1": ELSEWHERE,
    "python -m harness.report --check": ELSEWHERE,
    "make bench": EXPANDED,
    "make bench KERNEL=k6": EXPANDED,
    "make check": EXPANDED,
    "make check KERNEL=k2": EXPANDED,
    "make report": EXPANDED,
    "make site": EXPANDED,
    "make site-check": EXPANDED,
    "make test": ITSELF,
    "make test-torch TORCH=2.15.0": EXPANDED,
}


def commands(markdown: str) -> list[str]:
    """The python and make lines of a document's sh and bash blocks, without prompts and comments."""
    blocks = re.findall(r"^```(?:sh|bash|shell|console)[^\n]*\n(.*?)^```", markdown, re.M | re.S)
    lines = [line.strip().removeprefix("$ ") for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if COMMAND.match(f"{line} ")]
    return list(dict.fromkeys(map(" ".join, found)))


def test_commands_are_found() -> None:
    text = (
        "# Title\n\n```sh\npython bench.py k2   # comment\n$ CHECK=1 A=b python bench.py \\\n k1\nls\n```\n"
        "text `make nothing`\n```python\nmake = 1\n```\n```bash\nmake test\nmake test\nmaker x\n```\n"
    )
    assert commands(text) == ["python bench.py k2", "CHECK=1 A=b python bench.py k1", "make test"]


@pytest.mark.skipif(not README.exists(), reason="there is no README.md yet")
def test_every_command_of_the_documents_is_tested() -> None:
    found = [command for path in READ for command in commands(path.read_text(encoding="utf-8"))]
    assert len(found) > 20
    assert [command for command in found if command not in TESTED] == []


@pytest.mark.parametrize("command", [command for command, how in TESTED.items() if how == PARSED])
def test_long_commands_are_understood(command: str) -> None:
    program, *arguments = shlex.split(command)[1:]
    assert program == "bench.py"
    assert bench.parse(arguments).problems


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("make bench", "bench.py k2"),
        ("make bench KERNEL=k6", "bench.py k6"),
        ("make bench KERNEL=fa1", "bench.py fa1"),
        ("make check", "ref_check.py k2"),
        ("make check KERNEL=k2", "ref_check.py k2"),
        ("make report", "-m harness.report"),
        ("make report", "-m harness.draw"),
        ("make site", "-m harness.site"),
        ("make site-check", "-m harness.site_check"),
        ("make test", "-m ruff check ."),
        ("make test", "-m pytest"),
        ("make test-torch TORCH=2.15.0", "-m pytest tests/test_ops.py"),
    ],
)
def test_make_runs_the_right_program(command: str, runs: str) -> None:
    # Outside of the make that may run this test, whose flags would be taken over.
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "KERNEL")}
    make, *arguments = shlex.split(command)
    done = subprocess.run([make, "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    environment = ".venv-2.15.0" if "TORCH" in command else ".venv"
    runs = f"{environment}/bin/python {runs}"
    assert any(f"{line} ".startswith(f"{runs} ") for line in done.stdout.splitlines())


def test_make_commands_are_all_expanded() -> None:
    (mark,) = (m for m in test_make_runs_the_right_program.pytestmark if m.name == "parametrize")
    expanded = {command for command, _ in mark.args[1]}
    assert {command for command, how in TESTED.items() if how == EXPANDED} <= expanded
