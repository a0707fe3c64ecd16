"""The tree: arrows between modules go one way, and nothing stands where the map has no place for it.

Arrows are computed from paths (``use`` and others) of Rust files and from imports of Python files.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import qwen_rs

ROOT = Path(__file__).resolve().parents[2]
Name = tuple[str, ...]
"""A module's path from the root of its crate or package; ``()`` is the root itself."""
Graph = dict[Name, set[Name]]

TOP = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "rust", "python", "tests", "README.md", "LICENSE"}
RUST = {
    *("ARCHITECTURE.md", "lib", "backend", "error", "loader", "tensor", "linear", "cache", "kernels"),
    *("model", "engine", "sampler", "threads", "python", "benches"),
}
PYTHON = {"qwen_rs", "examples", "benchmarks", "demo_model", "CHANGELOG.md"}
PACKAGE = {
    *(
        "__init__",
        "__main__",
        "engine",
        "checkpoint",
        "serve",
        "cli",
        "display",
        "terminal_chat",
        "bench",
        "bench_serve",
        "_core",
        "py",
        "demo",
    ),
}
KNOW_NO_MODEL = ("loader", "linear", "cache", "kernels", "tensor")
MAX_LINES = 600
UNIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def circles(graph: Mapping[Name, Collection[Name]]) -> list[list[str]]:
    """Groups of modules each of which reaches the others."""

    def reached(start: Name) -> set[Name]:
        seen: set[Name] = set()
        waiting = list(graph.get(start, ()))
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(b for b in reach[a] if b in reach and a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted("::".join(name) or "lib" for name in group) for group in groups)


def rooms(graph: Graph) -> Graph:
    """The same between top-level modules."""
    out: Graph = {}
    for source, targets in graph.items():
        for target in targets:
            if source[:1] != target[:1]:
                out.setdefault(source[:1], set()).add(target[:1])
    return out


# Rust

NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\[^']+|[^'\\])'""", re.DOTALL
)
VISIBILITY = re.compile(r"pub\s*\([^)]*\)")
USE = re.compile(r"\b(pub\s+)?use\s+([^;]+);")
DEFINITION = r"\b(?:fn|struct|enum|union|trait|type|const|static)\s+{}\b"


@dataclass
class Module:
    """A Rust file."""

    text: str  # without comments, literals and use declarations
    uses: list[tuple[bool, list[str], str]] = field(default_factory=list)  # public, path, local name
    children: set[str] = field(default_factory=set)


def use_tree(text: str) -> Iterator[tuple[list[str], str]]:
    """``a::{b, c::{self, d as e}}`` as ``(path, local name)`` each."""
    head, brace, rest = text.partition("{")
    if not brace:
        path, _, alias = (part.strip() for part in text.partition(" as "))
        names = [name.strip() for name in path.split("::")]
        names = names[:-1] if names[-1] == "self" and len(names) > 1 else names
        yield names, alias or names[-1]
        return
    prefix = [name.strip() for name in head.split("::") if name.strip()]
    depth, part = 0, ""
    for letter in rest[: rest.rindex("}")] + ",":
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            if part.strip():
                for names, local in use_tree(part):
                    inner = [] if names == ["self"] else names
                    yield prefix + inner, prefix[-1] if not inner and local == "self" else local
            part = ""
        else:
            part += letter


def rust_modules(root: Path) -> dict[Name, Module]:
    modules: dict[Name, Module] = {}
    for path in sorted(root.rglob("*.rs")):
        *folders, stem = path.relative_to(root).with_suffix("").parts
        if "benches" in folders:
            continue
        name = tuple(folders) if stem in ("mod", "lib") else (*folders, stem)
        text = VISIBILITY.sub("pub", NOT_CODE.sub(" ", path.read_text(encoding="utf-8")))
        module = Module(USE.sub(" ", text))
        for public, tree in USE.findall(text):
            module.uses += [(bool(public), *use) for use in use_tree(tree)]
        modules[name] = module
    for name in modules:
        if name:
            modules[name[:-1]].children.add(name[-1])
    return modules


def absolute(modules: Mapping[Name, Module], module: Name, path: list[str]) -> Name | None:
    """A path as seen from a module; None: it begins in another crate or in a local name."""
    if path[0] == "crate":
        return tuple(path[1:])
    base, rest = list(module), list(path)
    while rest and rest[0] in ("self", "super"):
        if rest.pop(0) == "super" and base:
            base.pop()
    return (*base, *rest) if len(rest) < len(path) or path[0] in modules[module].children else None


def home(modules: Mapping[Name, Module], path: Name, seen: frozenset[Name] = frozenset()) -> Name:
    """The file that defines what a path names: re-exports are followed."""
    at = 0
    while path[: at + 1] in modules and at < len(path):
        at += 1
    module, rest = path[:at], path[at:]
    if not rest or path in seen:
        return module
    for public, names, local in modules[module].uses:
        target = absolute(modules, module, names) if public else None
        if target is not None and local == rest[0]:
            return home(modules, (*target, *rest[1:]), seen | {path})
        if target is not None and local == "*":
            from_glob = home(modules, (*target[:-1], *rest), seen | {path})
            if re.search(DEFINITION.format(re.escape(rest[0])), modules[from_glob].text):
                return from_glob
    return module


def rust_graph(root: Path) -> Graph:
    modules = rust_modules(root)
    graph: Graph = {name: set() for name in modules}
    for name, module in modules.items():
        found = []
        for public, names, _ in module.uses:
            target = absolute(modules, name, names)
            # A folder that hands on what its own files define does not use it.
            if target is not None and not (public and module.children and target[: len(name)] == name):
                found.append(target[:-1] if names[-1] == "*" else target)
        starts = "|".join(["crate", "super", "self", *sorted(module.children)])
        for path in re.findall(rf"(?<![\w:.])((?:{starts})(?:\s*::\s*\w+)+)", module.text):
            target = absolute(modules, name, re.split(r"\s*::\s*", path))
            found += [] if target is None else [target]
        graph[name] = {home(modules, target) for target in found} - {name}
    return graph


def arrows_to_the_model(graph: Graph) -> list[str]:
    return sorted(
        f"{'::'.join(source)} -> {'::'.join(target)}"
        for source, targets in graph.items()
        for target in targets
        if source[:1] in {(room,) for room in KNOW_NO_MODEL} and target[:1] == ("model",)
    )


# Python


def python_graph(root: Path) -> Graph:
    """Between the modules of the package in ``root``."""
    files: dict[Name, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        files[parts[:-1] if parts[-1] == "__init__" else parts] = path
    graph: Graph = {name: set() for name in files}
    for name, path in files.items():
        package = name if path.stem == "__init__" else name[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[Name] = []
            if isinstance(node, ast.ImportFrom):
                inner = tuple(node.module.split(".")) if node.module else ()
                if node.level:
                    base = package[: len(package) - node.level + 1] + inner
                elif inner[:1] == (root.name,):
                    base = inner[1:]
                else:
                    continue
                found = [
                    (*base, alias.name) if (*base, alias.name) in files else base for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                split = [tuple(alias.name.split(".")) for alias in node.names]
                found = [names[1:] for names in split if names[0] == root.name]
            graph[name] |= {target for target in found if target in files and target != name}
    return graph


# This tree


def test_no_circle_between_rust_files() -> None:
    assert circles(rust_graph(ROOT / "rust")) == []


def test_no_circle_between_rust_rooms() -> None:
    assert circles(rooms(rust_graph(ROOT / "rust"))) == []


def test_what_carries_a_model_does_not_know_it() -> None:
    assert arrows_to_the_model(rust_graph(ROOT / "rust")) == []


def test_no_circle_in_the_package() -> None:
    graph = python_graph(ROOT / "python" / "qwen_rs")
    assert circles(graph) == [] and circles(rooms(graph)) == []
    assert ("engine", "llm") in graph[()] and ("cli",) in graph[("__main__",)]


def tracked() -> list[Path]:
    """The repository's files; without git, all that are not hidden, built or cached."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [
            path for line in listed.stdout.splitlines() if (path := Path(line)) and (ROOT / path).exists()
        ]
    built = {"target", "__pycache__"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path for path in files if not built & set(path.parts) and path.suffix != ".so"]


def test_everything_has_its_place() -> None:
    names = [path.parts for path in tracked() if not path.parts[0].startswith(".")]
    assert {parts[0] for parts in names} == TOP

    def stems(*folder: str) -> set[str]:
        depth = len(folder)
        return {
            name if name.endswith(".md") else name.partition(".")[0]
            for parts in names
            if parts[:depth] == folder
            for name in [parts[depth]]
        }

    assert stems("rust") <= RUST
    assert stems("python") <= PYTHON
    assert stems("python", "qwen_rs") <= PACKAGE
    assert not [parts for parts in names if any(re.match(r"util(s|ities)?\b", part) for part in parts)]


def test_no_file_is_too_long() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in tracked()
        if path.suffix in (".rs", ".py", ".pyi")
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_the_package_imports_on_every_system() -> None:
    """No module that only Unix has is imported when the package is."""
    found = []
    for path in (ROOT / "python" / "qwen_rs").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found += [(path.name, a.name) for a in node.names if a.name in UNIX_ONLY]
            elif isinstance(node, ast.ImportFrom) and node.module in UNIX_ONLY:
                found.append((path.name, node.module))
    assert found == []


def test_the_version_stands_in_one_place() -> None:
    version = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert qwen_rs.__version__ in (version[1], "0+unknown")  # the second: not installed
    others = [path for path in tracked() if path.parts[0] == "python" and path.suffix in (".py", ".pyi")]
    for path in [*others, Path("pyproject.toml")]:
        assert f'"{version[1]}"' not in (ROOT / path).read_text(encoding="utf-8"), path


# Made-up trees: the tests above can fail


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


STRAIGHT = {
    "lib.rs": "mod loader; mod model; mod tensor; pub use model::Model;",
    "tensor.rs": 'pub struct Tensor; // crate::model in a comment\nconst S: &str = "crate::model::X";',
    "loader/mod.rs": "mod file;\npub use file::{File as Lent, *};\npub(in crate::model) fn f() {}",
    "loader/file.rs": "use crate::tensor::Tensor;\npub struct File; pub enum Kind {}",
    "model/mod.rs": "mod layer; mod pass;\npub use pass::Model;\npub const WIDTH: usize = 1;",
    "model/layer.rs": "use crate::{loader::{Kind, Lent}, tensor};\nuse super::WIDTH;",
    "model/pass.rs": "pub struct Model;\nfn f() { super::layer::g(); }",
}


def test_a_tree_without_circles_has_none(tmp_path: Path) -> None:
    graph = rust_graph(write(tmp_path, STRAIGHT))
    assert graph[("model", "layer")] == {("loader", "file"), ("tensor",), ("model",)}
    assert graph[("model", "pass")] == {("model", "layer")}
    assert graph[("loader",)] == graph[("model",)] == graph[("tensor",)] == graph[()] == set()
    assert circles(graph) == [] and circles(rooms(graph)) == []
    assert arrows_to_the_model(graph) == []


IN_MODEL = ["model::layer", "model::pass"]
MADE_UP = [  # (a file of the tree, what it says, the circle, whether rooms have it too)
    ("model/layer.rs", "use super::pass::Model;", IN_MODEL, False),
    ("model/layer.rs", "use super::Model;", IN_MODEL, False),
    ("model/layer.rs", "use crate::Model;", IN_MODEL, False),
    ("model/layer.rs", "fn g() -> super::super::model::pass::Model {}", IN_MODEL, False),
    ("model/mod.rs", "use layer::g; pub const WIDTH: u8 = 1;", ["model", "model::layer"], False),
    ("tensor.rs", "fn f(m: &crate::model::pass::Model) {}", ["loader::file", *IN_MODEL, "tensor"], True),
    (
        "loader/file.rs",
        "use crate::{tensor, model::{self, layer as l}}; pub struct File;",
        ["loader::file", "model::layer"],
        True,
    ),
]


@pytest.mark.parametrize(("file", "text", "circle", "rooms_too"), MADE_UP)
def test_a_made_up_circle_is_found(
    tmp_path: Path, file: str, text: str, circle: list[str], rooms_too: bool
) -> None:
    base = STRAIGHT[file] if file == "model/layer.rs" else ""
    graph = rust_graph(write(tmp_path, STRAIGHT | {file: base + text}))
    assert circles(graph) == [circle]
    assert (circles(rooms(graph)) != []) == rooms_too
    assert (arrows_to_the_model(graph) != []) == rooms_too


def test_a_made_up_circle_of_python_is_found(tmp_path: Path) -> None:
    package = write(
        tmp_path / "package",
        {
            "__init__.py": "from .a import one\n",
            "a/__init__.py": "",
            "a/one.py": "from ..b import two\nimport os.path\n",
            "b/__init__.py": "",
            "b/two.py": "",
        },
    )
    assert circles(python_graph(package)) == []
    (package / "b" / "two.py").write_text("def f():\n    from package.a.three import x\n")
    (package / "a" / "three.py").write_text("from . import one\n")
    graph = python_graph(package)
    assert circles(graph) == [["a::one", "a::three", "b::two"]]
    assert circles(rooms(graph)) == [["a", "b"]]
