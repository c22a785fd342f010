"""The house rules that a reader relies on: sizes, import directions, formatting."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pallas_attn"
FOLDERS = ("pallas_attn", "models", "benchmarks", "tests")
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
LIBRARY = sorted(PACKAGE.rglob("*.py"))
KERNELS = ("mosaic_gpu", "triton", "xla")

FILE_LINES, FUNCTION_LINES, KERNEL_LINES, PARAMETERS = 500, 80, 150, 10
# Calls whose options are theirs by contract; everything behind them takes a Spec, Tiles, Call.
PUBLIC = {
    "api.py": {"mha", "plan"},
    "varlen.py": {"mha_varlen"},
    "serving.py": {"paged_attention", "mha_decode", "page_subset_attention"},
    "jax_nn.py": {"dot_product_attention"},
    "explain.py": {"explain"},
    "flax_nnx.py": {"attention_fn", "__init__"},
    "flax_linen.py": {"attention_fn"},
    "_flax_common.py": {"attention_fn"},
}
# Modules that users call and that call `mha` or `plan` in turn.
ON_TOP = {
    f"{name}.py"
    for name in (
        *("__init__", "varlen", "jax_nn", "explain", "testing", "support", "serving", "paged"),
        *("flax_nnx", "flax_linen", "_flax_common"),
        *("inspect", "_sass", "_sass_worker", "_compile_only"),
    )
}
# Modules that must work for every backend, and so know none by import.
CORE = {
    f"{name}.py"
    for name in (
        *("spec", "tiles", "call", "gpu", "masks", "mask_core", "predicate", "block_table"),
        *("tile_math", "reference", "vjp", "partition", "api"),
        *("decode_call", "work", "combine", "allocator", "paged"),
    )
}


def name_of(path):
    return str(path.relative_to(ROOT))


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path):
    return [
        n for n in ast.walk(tree_of(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines_of(function):
    """Lines from `def` to the end, the docstring apart: describing well must cost nothing."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def is_kernel(path, function):
    return path.parent.name in KERNELS and function.name.endswith("kernel")


def imports(path):
    """Every module or name that a file imports anywhere, in full."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_from(path, module):
    return any(name == module or name.startswith(module + ".") for name in imports(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES, f"{name_of(path)}: {lines} lines, at most {FILE_LINES}"
    for function in functions(path):
        most = KERNEL_LINES if is_kernel(path, function) else FUNCTION_LINES
        assert lines_of(function) <= most, (
            f"{function.name}: {lines_of(function)} lines, at most {most}"
        )


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_parameters(path):
    for function in functions(path):
        if function.name in PUBLIC.get(path.name, ()):
            continue
        a = function.args
        count = len([*a.posonlyargs, *a.args, *a.kwonlyargs])
        count -= bool(a.args) and a.args[0].arg in ("self", "cls")
        assert count <= PARAMETERS, f"{function.name}: {count} parameters, at most {PARAMETERS}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports(path):
    found = imports(path)
    assert "__future__.annotations" not in found, "jaxtyping needs annotations that are evaluated"
    if path.name not in ("_compat.py", "_mosaic_interpret.py"):
        private = {n for n in found if n.startswith("jax._src")}
        assert not private, (
            f"{private}: version differences live in _compat.py and _mosaic_interpret.py"
        )


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_import_direction(path):
    if path.name not in ON_TOP:
        assert not imports_from(path, "pallas_attn.api"), "api is on top; nothing below imports it"
    assert not any(
        name.split(".")[0] in ("models", "benchmarks", "tests") for name in imports(path)
    )
    backends = {k for k in KERNELS if imports_from(path, f"pallas_attn.{k}")}
    if path.parent.name in KERNELS:
        # A bias's gradient is computed in plain JAX, by the one backend that takes everything, and
        # the gradients of Hopper's forward by the Triton kernels.
        others = {"triton/__init__.py": {"xla"}, "mosaic_gpu/__init__.py": {"triton"}}
        allowed = {path.parent.name} | others.get("/".join(path.parts[-2:]), set())
        assert backends <= allowed, f"kernel folders do not import each other: {backends}"
    elif path.name in CORE:
        assert not backends, "backends are loaded by name, when used"
    if path.name == "reference.py":
        shared = {n for n in imports(path) if n.startswith("pallas_attn.")}
        known = {"block_table", "mask_core", "masks"}
        assert {n.split(".")[1] for n in shared} <= known, (
            "the reference shares no maths with kernels"
        )


def test_a_backend_is_a_folder_with_five_functions():
    from pallas_attn import backends

    assert set(backends.ALL) == set(KERNELS)
    for name in backends.ALL:
        module = backends.load(name)
        for function in (
            "unsupported_reason",
            "candidate_tiles",
            "tiles_reason",
            "run_forward",
            "run_backward",
        ):
            assert callable(getattr(module, function))


def test_runtime_dependencies_are_few():
    """Importing the package brings in no extra."""
    code = (
        "import sys, pallas_attn; extras = 'flax optax matplotlib beartype torch tokamax'.split(); "
        "print(sorted(set(sys.modules) & set(extras)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_parts_of_jax_come_through_jax():
    """Named by itself, jaxlib or a plugin may be of a release that JAX itself is not of yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert not [one for one in asked if re.match(r"jaxlib|jax-(cuda|rocm)", one)]


def test_public_names_are_described():
    import pallas_attn as pa

    assert sorted(pa.__all__) == pa.__all__
    for name in pa.__all__:
        assert (getattr(pa, name).__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_every_module_states_its_job(path):
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no module docstring"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"#\s*(TODO|FIXME|XXX)\b", text)


@pytest.mark.parametrize("command", [("format", "--check"), ("check",)], ids=lambda c: c[0])
def test_ruff(command):
    ruff = shutil.which("ruff", path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
        "ruff"
    )
    if ruff is None:
        pytest.skip("ruff is not installed")
    folders = [f for f in FOLDERS if (ROOT / f).is_dir()]
    done = subprocess.run(
        [ruff, *command, "--no-cache", *folders],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
