"""Who may import whom: every file is parsed, and an arrow that the table does not have fails.

Adding an arrow is a design decision: say why in the commit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A part is a module or folder directly under specc; "specc" is its __init__.py. Within a part all is free.
_BASE = frozenset({"errors", "files", "tree", "ops", "graph", "contracts"})
_BUILT = _BASE | {
    "drafters",
    "methods",
    "checkpoints",
    "sampling",
    "models",
    "device",
    "pipeline",
    "step",
    "stitch",
    "trace",
    "build",
}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "files": frozenset({"errors"}),
    "tree": frozenset({"errors"}),  # the shape of a draft, which the operators' masks are made of
    "ops": frozenset({"errors", "tree"}),
    "graph": frozenset({"errors", "ops"}),
    "contracts": frozenset({"errors", "tree", "ops", "graph"}),
    "drafters": _BASE,
    "passes": _BASE,
    "backends": _BASE,
    "methods": _BASE | {"drafters"},
    "checkpoints": _BASE | {"drafters", "models"},  # an MTP drafter's layers are the target family's own
    "sampling": _BASE,
    "models": _BASE | {"device"},  # the default dtype of a load depends on the device
    "device": _BASE,
    "pipeline": _BASE,
    "step": _BASE | {"sampling"},
    "stitch": _BASE
    | {"passes", "pipeline", "sampling", "step"},  # a package's stages are assembled without `build`
    "trace": _BASE | {"models"},
    "build": (_BUILT | {"passes", "backends"}) - {"build"},
    "runtime": (_BUILT - {"methods"}) | {"artifact"},  # `Compiled.save`; a package knows no runtime
    # A package's native code is compiled when it is saved, and run by a backend that reads it from there.
    "artifact": (_BUILT | {"backends"}) - {"methods", "build", "models"},
    # Loading is public and must not reach what api needs to trace models.
    "loading": _BASE | {"device", "methods", "backends", "artifact", "runtime"},
    "tuning": _BUILT,
    "training": _BUILT | {"runtime", "prompts"},  # the target makes its own training data, as compiled
    "pairing": _BASE | {"checkpoints", "models"},
    "prompts": _BASE | {"models"},
    # Checks and measurements are handed `compile` by api, which they may not import.
    "checking": (_BUILT - {"methods"}) | {"runtime", "pairing", "prompts"},
    "benchmark": (_BUILT - {"methods"}) | {"runtime", "pairing", "prompts"},
    "api": _BUILT
    | {"runtime", "artifact", "loading", "tuning", "training", "pairing", "checking", "benchmark", "prompts"},
    "cli": frozenset({"specc", "errors", "files", "api"}),
    "specc": frozenset({"errors", "api", "loading"}),
}
# Third parties that only one part may name, and modules that nobody may.
ONLY_IN = {
    "transformers": "models",
    "triton": "backends",
    "flashinfer": "backends",
    "typer": "cli",
    "rich": "cli",
}
BANNED = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})
BANNED_CALLS = frozenset({"torch.load"})
# Calls and assignments that change torch for the whole process; at the top of a module they run on import.
FLAG_CALLS = frozenset(
    {
        "torch.manual_seed",
        "torch.set_num_threads",
        "torch.set_num_interop_threads",
        "torch.set_default_dtype",
        "torch.set_default_device",
        "torch.set_grad_enabled",
        "torch.set_float32_matmul_precision",
        "torch.use_deterministic_algorithms",
    }
)


@dataclass(frozen=True)
class Source:
    """One file of the package: where it is, the module it is and the part it belongs to."""

    path: Path
    module: str
    part: str
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def read_source(path: Path, text: str | None = None) -> Source:
    """Parse a file; ``text`` replaces its content."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "specc":  # passes/ and backends/ install under specc
        parts.insert(0, "specc")
    if parts[-1] == "__init__":
        parts.pop()
    tree = ast.parse(path.read_text(encoding="utf-8") if text is None else text, str(path))
    return Source(path, ".".join(parts), parts[1] if len(parts) > 1 else "specc", tree)


def sources() -> list[Source]:
    files = (file for folder in ("specc", "passes", "backends") for file in (ROOT / folder).rglob("*.py"))
    return [read_source(file) for file in sorted(files)]


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import, at any depth, as the statement and the dotted names it may bind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def target_part(name: str) -> str:
    """Return the part that importing ``name`` reaches: the x of ``from specc import x`` if x is a part."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in MAY_IMPORT else "specc"


def layer_faults(source: Source) -> list[str]:
    if source.part not in MAY_IMPORT:
        return [f"{source.at(source.tree)}: part {source.part!r} has no row in MAY_IMPORT"]
    allowed = MAY_IMPORT[source.part] | {source.part}
    faults = []
    for node, name in imports(source.tree):
        top = name.split(".")[0]
        if top == "specc" and target_part(name) not in allowed:
            faults.append(f"{source.at(node)}: {source.part} imports {name}")
        if top in ("passes", "backends", "tests", "examples"):
            faults.append(f"{source.at(node)}: imports {name}, which is not an installed name")
        if top in BANNED:
            faults.append(f"{source.at(node)}: imports {name}; no pickle anywhere")
        if top in ONLY_IN and source.part != ONLY_IN[top]:
            faults.append(
                f"{source.at(node)}: {top} is imported only in {ONLY_IN[top]}, not in {source.part}"
            )
    relative = (node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) and node.level)
    return faults + [f"{source.at(node)}: relative import" for node in relative]


def statements_run_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what importing the module executes: everything outside function bodies."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def rule_faults(source: Source) -> list[str]:
    """Return breaches of the rules on calls: print, torch.load, environment and torch flags on import."""
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "print" and source.part != "cli":
            faults.append(f"{source.at(node)}: prints; modules log, only the CLI prints")
        if called in BANNED_CALLS:
            faults.append(f"{source.at(node)}: calls {called}")
    for node in statements_run_on_import(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            faults.append(f"{source.at(node)}: reads the environment on import")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FLAG_CALLS:
            faults.append(f"{source.at(node)}: sets a torch flag on import")
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target).startswith("torch.") for target in targets):
                faults.append(f"{source.at(node)}: sets a torch flag on import")
    return faults


def test_every_file_keeps_its_layer() -> None:
    assert [fault for source in sources() for fault in layer_faults(source)] == []


def test_every_file_keeps_the_rules() -> None:
    assert [fault for source in sources() for fault in rule_faults(source)] == []


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part, needs in MAY_IMPORT.items() if part not in done and needs - {"specc"} <= done}
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


def test_passes_backends_and_methods_never_meet_outside_build() -> None:
    for part in ("passes", "backends", "methods"):
        importers = {name for name, needs in MAY_IMPORT.items() if part in needs}
        assert importers <= {"build", "stitch", "loading", "tuning", "training", "api", "artifact"}
    assert not MAY_IMPORT["methods"] & {"passes", "backends"}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("passes/x.py", "from specc.backends import BACKENDS", "passes imports specc.backends"),
        ("specc/methods/x.py", "def f():\n    import specc.passes.y", "methods imports specc.passes.y"),
        ("specc/errors.py", "from specc import contracts", "errors imports specc.contracts"),
        ("specc/runtime/x.py", "import specc", "runtime imports specc"),
        ("specc/api.py", "import passes", "not an installed name"),
        ("specc/build.py", "import transformers.utils", "transformers is imported only in models"),
        ("specc/graph.py", "from pickle import loads", "no pickle"),
        ("specc/graph.py", "from . import errors", "relative import"),
        ("specc/novelty.py", "", "no row"),
    ],
)
def test_a_wrong_import_is_found(file: str, text: str, fault: str) -> None:
    assert any(fault in found for found in layer_faults(read_source(ROOT / file, text)))


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("specc/graph.py", "def f():\n    print(1)", "prints"),
        ("specc/graph.py", "def f():\n    torch.load('x')", "calls torch.load"),
        ("specc/device.py", "import os\nX = os.environ['A']", "environment on import"),
        ("specc/device.py", "torch.set_num_threads(1)", "torch flag"),
        ("specc/device.py", "class A:\n    torch.backends.cuda.matmul.allow_tf32 = True", "torch flag"),
    ],
)
def test_a_wrong_call_is_found(file: str, text: str, fault: str) -> None:
    assert any(fault in found for found in rule_faults(read_source(ROOT / file, text)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("specc/cli/x.py", "from specc import api\nimport specc.cli.console\nprint(1)"),
        ("specc/models/x.py", "import transformers"),
        ("specc/device.py", "import os\ndef f():\n    return os.environ.get('A')"),
        ("backends/kernels/x.py", "import triton\nfrom specc.ops import attend"),
    ],
)
def test_a_right_file_passes(file: str, text: str) -> None:
    source = read_source(ROOT / file, text)
    assert layer_faults(source) + rule_faults(source) == []
