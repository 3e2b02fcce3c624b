"""What `pip install` makes of this tree, and who is whose `kernels` afterwards."""

import email
import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import hopper_attention
from hopper_attention import cache, launch
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

ROOT = Path(__file__).resolve().parents[1]

# Imports the modules it is given; prints which are not there, and every module's file.
LOOK = """
import importlib, json, sys
missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name, error
        missing.append(name)
files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
print(json.dumps([missing, {name: file for name, file in files.items() if file}]))
"""

# Imports the library and `kernels` once with each list of folders in front; prints where they came from.
ORDERS = """
import json, os, sys, torch
for folders in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.path[1:1] = folders
        import hopper_attention, kernels
        print(json.dumps([hopper_attention.__file__, kernels.__file__]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(*command: str, folder: Path, path: tuple[Path, ...] = ()) -> str:
    """The output of a Python command in `folder`, with only `path` on PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def look(folder: Path, path: tuple[Path, ...], *modules: str) -> tuple[list[str], dict[str, Path]]:
    """Of `modules` imported in a process of their own those that are missing; the real files of all."""
    missing, files = json.loads(run("-c", LOOK, *modules, folder=folder, path=path).splitlines()[-1])
    return missing, {name: Path(file).resolve() for name, file in files.items()}


def names_within(folder: Path, files: dict[str, Path]) -> dict[str, list[str]]:
    """Of each imported file in `folder`, by its path there, the names that it was imported by."""
    found: dict[str, list[str]] = {}
    for name, file in files.items():
        if file.is_relative_to(folder.resolve()):
            found.setdefault(str(file.relative_to(folder.resolve())), []).append(name)
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a clone would have it: what git tracks or would, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip(f"git does not list the files of {ROOT}")
    copy = tmp_path_factory.mktemp("checkout")
    for name in os.fsdecode(listed.stdout).split("\0"):
        if name and os.path.lexists(ROOT / name):  # not what was deleted and not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    assert (copy / "hopper_attention" / "kernels").is_symlink()
    return copy


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds another project's `kernels`."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("")
    return folder


def build(kind: str, tree: Path, out: Path) -> Path:
    """The one file that the build backend makes of `tree`: a "wheel", an "editable" one or an "sdist"."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run("-c", code, str(out), folder=tree)
    (built,) = out.iterdir()
    return built


def install(wheel: Path, target: Path) -> Path:
    command = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    run(*command, folder=wheel.parent)
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    (text,) = (x for name, x in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(text)


# ---- the wheel ---------------------------------------------------------------------------------------------


def test_the_wheel_is_the_library_and_nothing_else(checkout: Path, wheel: Path) -> None:
    found = contents(wheel)
    dist_info = f"hopper_attention-{hopper_attention.__version__}.dist-info"
    assert {name.partition("/")[0] for name in found} == {"hopper_attention", dist_info}
    assert found[f"{dist_info}/top_level.txt"].split() == [b"hopper_attention"]
    assert found[f"{dist_info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    expected = {}
    for folder, place in (("hopper_attention", "hopper_attention"), ("kernels", "hopper_attention/kernels")):
        for path in (checkout / folder).rglob("*"):  # it follows no links
            if path.is_file() and not path.name.endswith(".pyc"):
                expected[f"{place}/{path.relative_to(checkout / folder)}"] = path.read_bytes()
    assert {f"hopper_attention/kernels/{file}.py" for file in ladder.LADDER.values()} < set(expected)
    library = {name: content for name, content in found.items() if not name.startswith(dist_info)}
    assert sorted(library) == sorted(expected)
    assert library == expected


def test_the_source_distribution_makes_the_same_wheel(
    checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    archive = build("sdist", checkout, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(archive, unpacked)
    (tree,) = unpacked.iterdir()
    again = build("wheel", tree, tmp_path_factory.mktemp("again"))
    for name, content in contents(again).items():
        assert name.endswith("/RECORD") or content == contents(wheel)[name]
    assert set(contents(again)) == set(contents(wheel))


def test_what_it_needs(wheel: Path) -> None:
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == ("hopper-attention", hopper_attention.__version__)
    assert (about["Requires-Python"], about["License-Expression"]) == (">=3.10", "Apache-2.0")
    needed = {x.name: x for x in map(Requirement, about.get_all("Requires-Dist")) if not x.marker}
    assert sorted(needed) == ["apache-tvm-ffi", cache.COMPILER, "torch"]
    for name, pinned in pins().items():
        assert name not in needed or needed[name].specifier.contains(pinned), name
    assert needed.keys() <= pins().keys()
    assert needed["torch"].specifier.contains("2.11.0")
    assert needed[cache.COMPILER].specifier.contains("4.99.0")
    assert not needed[cache.COMPILER].specifier.contains("5.0.0")


# ---- who is imported ---------------------------------------------------------------------------------------


def test_installed_it_has_one_name(installed: Path, empty: Path) -> None:
    asked = ("hopper_attention", "hopper_attention.kernels.k6", "kernels", "harness")
    missing, files = look(empty, (installed,), *asked)
    assert missing == ["kernels", "harness"]
    found = names_within(installed, files)
    assert found["hopper_attention/kernels/k6.py"] == ["hopper_attention.kernels.k6"]
    assert found["hopper_attention/__init__.py"] == ["hopper_attention"]
    assert [names for names in found.values() if len(names) > 1] == []


def test_a_bare_checkout_has_one_name(checkout: Path) -> None:
    _, files = look(checkout, (), "hopper_attention.kernels.k6", "bench", "ref_check")
    found = names_within(checkout, files)
    assert found["kernels/k6.py"] == ["hopper_attention.kernels.k6"]
    assert found["hopper_attention/__init__.py"] == ["hopper_attention"]
    assert [names for names in found.values() if len(names) > 1] == []
    assert found["harness/cases.py"] == ["harness.cases"]


def test_an_editable_install_has_one_name(checkout: Path, empty: Path, tmp_path: Path) -> None:
    wheel = build("editable", checkout, tmp_path)
    site = install(wheel, tmp_path / "site")
    # Python reads the .pth file of an editable install in site folders only.
    asked = ["hopper_attention.kernels.k6", "kernels", "harness"]
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.argv[1:] = {asked}\n{LOOK}"
    missing, files = json.loads(run("-c", code, folder=empty).splitlines()[-1])
    assert missing == ["kernels", "harness"]
    found = names_within(checkout, {name: Path(file).resolve() for name, file in files.items()})
    assert found["kernels/k6.py"] == ["hopper_attention.kernels.k6"]
    assert [names for names in found.values() if len(names) > 1] == []


def test_kernels_of_another_project_stays_its_own(
    checkout: Path, installed: Path, other: Path, empty: Path
) -> None:
    orders = [[installed, other], [other, installed], [checkout, other], [checkout, installed, other]]
    found = run("-c", ORDERS, json.dumps(orders, default=str), folder=empty).splitlines()
    for order, line in zip(orders, found, strict=True):
        first = next(folder for folder in order if folder != other)
        assert json.loads(line) == [
            str(x / "__init__.py") for x in (first / "hopper_attention", other / "kernels")
        ]


def test_it_imports_neither_the_compiler_nor_a_kernel_file(empty: Path, installed: Path) -> None:
    _, files = look(empty, (installed,), "hopper_attention")
    assert "hopper_attention.kernels.calls" in files
    assert [name for name in files if name.partition(".")[0] == "cutlass"] == []
    compiling = {*ladder.LADDER.values(), "quantize"}
    assert files.keys() & {f"hopper_attention.kernels.{file}" for file in compiling} == set()


def test_without_the_compiler_it_refuses_and_names_it(empty: Path, installed: Path) -> None:
    code = (
        "import sys; sys.modules['cutlass'] = None\n"
        "import hopper_attention, torch\n"
        "q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)\n"
        "try: hopper_attention.attention(q, q, q)\n"
        "except ValueError as error: print(error)\n"
        "from hopper_attention import checks, launch\n"
        "try: launch.compile_stage('k6', checks.problem_of(q, q, q))\n"
        "except ModuleNotFoundError as error: print(error.name)"
    )
    refused, missing = run("-c", code, folder=empty, path=(installed,)).splitlines()
    assert refused == "q, k and v must be on a CUDA device, not cpu"
    assert missing == "cutlass"


# ---- the compiler ------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """What requirements.txt pins, for the Python that runs."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    found = {}
    for requirement in (Requirement(line) for line in lines if line):
        (exactly,) = requirement.specifier
        assert exactly.operator == "=="
        if requirement.marker is None or requirement.marker.evaluate():
            found[requirement.name] = exactly.version
    return found


def test_the_pinned_compiler_is_the_proven_one() -> None:
    assert pins()[cache.COMPILER] == launch.PROVEN_COMPILER


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has compiled nothing and warned of nothing."""
    monkeypatch.setattr(launch, "_compiled", {})
    launch.warn_unless_proven.cache_clear()
    yield
    launch.warn_unless_proven.cache_clear()


LIBRARY = f"{cache.COMPILER}-libs-base"
PROVEN = launch.PROVEN_COMPILER
UNREADABLE = "of a version that cannot be read"


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({cache.COMPILER: "4.9.0", LIBRARY: "4.9.0"}, f"{cache.COMPILER} 4.9.0"),
        ({cache.COMPILER: PROVEN, LIBRARY: "4.9.0"}, f"{cache.COMPILER} {PROVEN}, {LIBRARY} 4.9.0"),
        ({cache.COMPILER: PROVEN, LIBRARY: None}, f"{cache.COMPILER} {PROVEN}, {LIBRARY} {UNREADABLE}"),
        ({LIBRARY: PROVEN}, f"{cache.COMPILER} {UNREADABLE}, {LIBRARY} {PROVEN}"),
        ({cache.COMPILER: None}, f"{cache.COMPILER} {UNREADABLE}"),
        ({}, f"{cache.COMPILER} {UNREADABLE}"),
        (None, f"{cache.COMPILER} {UNREADABLE}"),
    ],
)
def test_another_compiler_is_named(
    versions: dict[str, str | None] | None, said: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed() -> dict[str, str | None]:
        if versions is None:
            raise KeyError("Version")
        return versions

    monkeypatch.setattr(cache, "compiler_versions", installed)
    with pytest.warns(launch.UnprovenCompilerWarning) as caught:
        launch.warn_unless_proven()
        launch.warn_unless_proven()
    (warning,) = caught
    assert str(warning.message).endswith(f"; this is {said}: its machine code is unproven")


@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "loaded"])
@pytest.mark.parametrize("proven", [False, True], ids=["another", "proven"])
def test_a_kernel_of_another_compiler_warns_once(
    cached: bool, proven: bool, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = PROVEN if proven else "4.9.0"
    stage, file = ladder.load("k2")
    compiled = SimpleNamespace(ir_module="", __cubin__=b"")
    toy = SimpleNamespace(supports=file.supports, compile_kernel=lambda problem, **options: compiled)
    entry = cache.Entry(Path("kernel.o"), b"", {"constants": []}) if cached else None
    monkeypatch.setenv(cache.VARIABLE, "")
    monkeypatch.setattr(cache, "compiler_versions", lambda: {cache.COMPILER: version})
    monkeypatch.setattr(cache, "load", lambda key: entry)
    monkeypatch.setattr(launch, "_load", lambda entry: print)
    monkeypatch.setattr(ladder, "load", lambda stage_id: (stage, toy))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for causal in (False, True):
            launch.compile_stage("k2", Problem.square(1, 1, 1, 64, causal))
    assert len(launch._compiled) == 2
    assert [x.category for x in caught] == ([] if proven else [launch.UnprovenCompilerWarning])
