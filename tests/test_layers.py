"""What the source tree promises: imports point down, the core knows no Python, nothing read is ever run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pystale"
CORE = ROOT / "csrc"

# Lowest first. A module may import its own layer and those below; `demo` stands for everything in that folder.
LAYERS = (
    ("_core", "_objects", "_reference"),
    ("arguments", "group", "policy", "staleness", "state"),
    (
        "accumulators",
        "batch",
        "blocking",
        "buffer",
        "buffer_report",
        "checkpoint",
        "checkpoint_files",
        "checkpoint_reader",
        "collector",
        "columns",
        "decoding",
        "disposal",
        "effects",
        "field_types",
        "files",
        "handed_out",
        "history",
        "in_flight",
        "journal",
        "ledger",
        "lengths",
        "masks",
        "metrics",
        "off_policy",
        "operations",
        "payload",
        "readiness",
        "reading",
        "record",
        "reservations",
        "saving",
        "segment",
        "store",
        "strict_json",
        "summary",
        "take",
        "ticket",
        "trajectories",
        "versions",
        "waiting",
        "writing",
    ),
    (
        "backoff",
        "call",
        "client",
        "continuation",
        "engine",
        "background",
        "disaggregated",
        "manager",
        "pending",
        "plan",
        "producer",
        "production",
        "production_loop",
        "rollout",
        "sampler",
        "sglang",
        "side_data",
        "progress",
        "report",
        "result",
        "rounds",
        "tasks",
    ),
    ("integrations",),
    ("bench", "cli", "demo", "__main__", "plots"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# `pystale` itself gathers what users need, and is imported only by what stands above all it gathers.
GATHERS = LEVEL["producer"]

CYTHON = (".pyx", ".pxi")
MODULES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyi", *CYTHON))
# `_reference` is the plain-Python meaning of the kernels: read and compared with, never what a user calls.
BEHAVIOUR = [path for path in MODULES if path.suffix == ".py" and path.stem != "_reference"]
CORE_FILES = [path for path in sorted(CORE.glob("*.?pp")) if not path.stem.startswith("bindings")]
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name(path))


def part(module: str) -> str:
    """Entry of LAYERS that a dotted module name belongs to; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    if path.suffix == ".pxi":  # text of the one Cython module
        return "pystale._objects"
    words = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def imports(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports, at any depth: functions and type-checking blocks count too."""
    if path.suffix in CYTHON:  # Cython's grammar is not Python's; its imports are one a line
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r"\s*(?:from\s+([\w.]+)\s+)?c?import\s+([\w.]+)", line)
            if found:
                yield f"{found[1]}.{found[2]}" if found[1] else found[2]
        return
    package = module_of(path) if path.stem == "__init__" else module_of(path).rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_source_tree_is_where_these_tests_look():
    assert BEHAVIOUR
    assert CORE_FILES


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_point_down(path):
    own = part(module_of(path))
    assert own == "" or own in LEVEL, f"{name(path)} is in no layer; add it to LAYERS"
    level = LEVEL.get(own, GATHERS)
    for imported in imports(path):
        if imported.split(".")[0] != "pystale":
            continue
        target = part(imported)
        assert LEVEL.get(target, GATHERS) <= level, f"{name(path)} imports {imported}, which is above it"
        assert target in LEVEL or own == "" or level > GATHERS, (
            f"{name(path)} imports {imported} through the package; import the module that defines it"
        )


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_only_bindings_know_python(path):
    for header in includes(path):
        assert not re.match(r"Python\.h|pybind11/|numpy/|bindings", header), f"{name(path)} includes {header}"


@pytest.mark.parametrize("path", BEHAVIOUR, ids=name)
def test_behaviour_does_not_hang_on_assert(path):
    lines = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not lines, f"{name(path)} asserts in lines {lines}; `python -O` drops them, so raise instead"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_that_runs_what_it_reads(path):
    unsafe = [imported for imported in imports(path) if imported.split(".")[0] in UNSAFE_MODULES]
    assert not unsafe, f"{name(path)} imports {unsafe}"
    if path.suffix in CYTHON:
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), f"{name(path)}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), f"{name(path)}:{node.lineno} may unpickle"
            assert node.value.value is False, f"{name(path)}:{node.lineno} unpickles"
