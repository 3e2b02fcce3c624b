"""Dependencies point one way: kernels, the library, the harness, on top the commands and the tests."""

import ast
import graphlib
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "hopper_attention.kernels"
PACKAGES = {KERNELS: ROOT / "kernels"} | {name: ROOT / name for name in ("hopper_attention", "harness")}
ON_TOP = {"bench", "ref_check", "tests"}
# Never `kernels`: at the root that is a second name for the same files, elsewhere another distribution.
OURS = {"harness", "hopper_attention", "kernels", *ON_TOP}


class Import(NamedTuple):
    """One imported name, as an absolute one: a module, or a module's member."""

    where: str
    name: str
    relative: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def sources(package: str) -> dict[str, Path]:
    """The modules of a package by name. Links are not followed, so that every file has one name."""
    found = {}
    for path in sorted(PACKAGES[package].rglob("*.py")):
        parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
        found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    """Everything that a file imports, inside of functions too: putting off an import does not undo it."""
    found = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            found += [Import(where, alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [Import(where, f"{prefix}.{alias.name}", node.level > 0) for alias in node.names]
    return found


def module_of(found: Import, modules: dict[str, Path]) -> str:
    """The module that is imported, or that the member is of, where it is one of `modules`."""
    return found.name if found.name in modules else found.name.rpartition(".")[0]


def of(package: str) -> list[Import]:
    return [found for name, path in sources(package).items() for found in imports(name, path)]


def test_kernels_import_nothing_of_ours_but_each_other() -> None:
    found = of(KERNELS)
    assert [x for x in found if not x.relative and x.top in OURS] == []
    assert [x for x in found if x.relative and not x.name.startswith(f"{KERNELS}.")] == []


def test_what_a_call_needs_of_kernels_imports_no_compiler() -> None:
    modules = sources(KERNELS)
    new, reached = [f"{KERNELS}.{name}" for name in ("calls", "calls_fp8", "device.fp8")], set()
    while new:
        name = new.pop()
        reached.add(name)
        found = imports(name, modules[name])
        assert [x for x in found if x.top == "cutlass"] == []
        new += {module_of(x, modules) for x in found} & modules.keys() - reached
    assert {f"{KERNELS}.contract", f"{KERNELS}.device.limits"} < reached


def test_the_library_imports_kernels_only() -> None:
    assert [x for x in of("hopper_attention") if x.top in OURS - {"hopper_attention"}] == []


def test_the_harness_imports_neither_commands_nor_tests() -> None:
    assert [x for x in of("harness") if x.top in OURS - {"hopper_attention", "harness"}] == []


def test_commands_and_tests_know_the_kernels_by_one_name() -> None:
    paths = [ROOT / "bench.py", ROOT / "ref_check.py", *sorted((ROOT / "tests").glob("*.py"))]
    assert [x for path in paths for x in imports(path.stem, path) if x.top == "kernels"] == []


def test_the_cache_needs_the_standard_library_only() -> None:
    found = imports("hopper_attention.cache", ROOT / "hopper_attention" / "cache.py")
    assert [x for x in found if x.relative or x.top not in sys.stdlib_module_names] == []


def test_no_import_cycles() -> None:
    modules = {name: path for package in PACKAGES for name, path in sources(package).items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        needed = graph.setdefault(name, set())
        for found in imports(name, path):
            target = module_of(found, modules)
            needed |= {target} & modules.keys() - {name}
            # It also runs the packages above it, but for those that run already, being above this one too.
            parts = target.split(".")
            above = {".".join(parts[:i]) for i in range(1, len(parts))}
            needed |= {x for x in above & modules.keys() if not f"{name}.".startswith(f"{x}.")}
    assert sum(map(len, graph.values())) > len(graph) / 2  # imports were found
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    assert sorted(order) == sorted(modules)
