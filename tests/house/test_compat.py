"""Only recipekit/compat replaces attributes of other packages. Each replacement states its reason,
the version, the test that needs it, and when it can be removed.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from pool import ROOT

KIT = ROOT / "recipes" / "recipekit"
COMPAT = KIT / "compat"
FILES = [*sorted(KIT.rglob("*.py")), *sorted((ROOT / "launch").rglob("*.py"))]
OUTSIDE = [path for path in FILES if not path.is_relative_to(COMPAT)]
OURS = {"recipekit", "launch", *(path.stem for path in (ROOT / "launch").glob("*.py"))}

# Attributes that a library or the language documents as variables, so assigning them is not a
# patch.
SETTABLE = {
    "os.environ": "a mapping to change (os)",
    "sys.excepthook": "a hook to replace (sys)",
    "sys.path": "a list to change (sys)",
    "sys.modules": "a mapping to change (sys)",
}
# attribute -> the documented object whose attribute may be assigned
DOCUMENTED = {
    "grad": "torch.Tensor.grad",
    "data": "torch.Tensor.data, of buffers that change their device or dtype",
    "daemon": "threading.Thread",
    "filename": "OSError",
    "msg": "logging.LogRecord, in a filter",
    "args": "logging.LogRecord, in a filter",
    "__file__": "types.ModuleType, of a module that we make",
    "__kwdefaults__": "types.FunctionType, of a function that we make",
    "flags": "argparse.Namespace",
    "returncode": "subprocess.Popen, of a process that another call has waited for",
    "mask_token": "PreTrainedTokenizerBase",
    "cls_token": "PreTrainedTokenizerBase",
    "sep_token": "PreTrainedTokenizerBase",
    "chat_template": "PreTrainedTokenizerBase",
    "name_or_path": "PreTrainedTokenizerBase",
    "pre_tokenizer": "tokenizers.Tokenizer",
    "decoder": "tokenizers.Tokenizer",
    "post_processor": "tokenizers.Tokenizer",
    "use_cache": "PreTrainedConfig",
    "architectures": "PreTrainedConfig",
    "base_model_name_or_path": "peft.PeftConfig",
    "revision": "peft.PeftConfig",
    "inference_mode": "peft.PeftConfig",
    "init_lora_weights": "peft.LoraConfig",
    "file_size": "zipfile.ZipInfo",
    "compress_size": "zipfile.ZipInfo",
    "header_offset": "zipfile.ZipInfo",
    "CRC": "zipfile.ZipInfo",
    "extra": "zipfile.ZipInfo",
}
# an attribute that we add to a library's object -> its contents; no library class has the attribute
ADDED = {
    "made": "values from the constructors, of an empty model",
    "stages": "models of a pipeline rank",
    "pending_kwargs": "inputs that do not travel between pipeline stages",
    "stage_kwargs": "names of these inputs",
    "last_stage": "True for the last stage of a pipeline",
    "num_embeddings": "tokens of a tokenizer that have an embedding",
    "tag_classes": "classes of a model, for the labels that a tokenizer's words have",
}
# assignment -> the reason why its object does not belong to a library
OWN = {
    "recipes/recipekit/storage/torch_files.py: vars(made).update(state)": "Stand is our class",
}
# Classes whose methods no other file may replace.
CLASSES = (
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "deepspeed.runtime.pipe.engine.PipelineEngine",
    "deepspeed.runtime.pipe.module.PipelineModule",
    "transformers.PreTrainedModel",
    "transformers.PreTrainedConfig",
    "transformers.PreTrainedTokenizerBase",
)
CHANGES = {"update", "pop", "clear", "setdefault", "popitem", "__setitem__", "__delitem__"}
LABELS = ("Why:", "Version:", "Test:", "Until:")


@functools.cache
def declared() -> frozenset[str]:
    """Return the attributes of this project's classes: fields, and attributes assigned to self in
    methods.
    """
    found: set[str] = set()
    for path in OUTSIDE:
        for owner in ast.walk(ast.parse(path.read_text())):
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in ast.walk(owner):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, ast.FunctionDef) and node in owner.body:
                    found.add(node.name)
                elif (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and ast.unparse(node.value) == "self"
                ):
                    found.add(node.attr)
    return frozenset(found)


@functools.cache
def methods() -> frozenset[str]:
    """Return the methods of CLASSES."""
    found: set[str] = set()
    for name in CLASSES:
        module, _, kind = name.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
        found |= {
            key for key in dir(owner) if inspect.isroutine(inspect.getattr_static(owner, key))
        }
    return frozenset(found)


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the names that a file imports from outside this project -> their full names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in found.items() if full.partition(".")[0] not in OURS}


def links(target: ast.expr) -> tuple[str, list[str]]:
    """Return the name at the start of `a.b[c].d`, and the attributes after it."""
    attributes: list[str] = []
    while isinstance(target, ast.Attribute | ast.Subscript):
        if isinstance(target, ast.Attribute):
            attributes.append(target.attr)
        target = target.value
    if isinstance(target, ast.Call) and ast.unparse(target.func) == "vars":
        attributes.append("__dict__")
        target = target.args[0]
        name, inner = links(target)
        return name, [*inner, *reversed(attributes)]
    return (target.id if isinstance(target, ast.Name) else ""), attributes[::-1]


def stored(tree: ast.AST) -> Iterator[tuple[ast.expr, str, list[str]]]:
    """Yield each assignment to, and removal of, an attribute or an item, as (node, name,
    attributes).

    A call that changes an object's attributes also counts: `setattr(a, ...)`,
    `vars(a).update(...)`, `a._parameters.update(...)`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node.ctx, ast.Store | ast.Del):
                yield node, *links(node)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in ("setattr", "delattr"):
                name, attributes = links(node.args[0])
                yield node, name, [*attributes, "__dict__"]
            elif isinstance(function, ast.Attribute) and function.attr in CHANGES:
                name, attributes = links(function.value)
                own = name in ("self", "cls")
                if any(private(attribute) for attribute in attributes[own:]):
                    yield node, name, attributes


def private(attribute: str) -> bool:
    return attribute.startswith("_")


def reason(name: str, attributes: list[str], item: bool, known: dict[str, str]) -> str:
    """Return why an assignment is a patch; "" if it is not a patch.

    With `item`, the assignment changes an item of the last attribute instead of the attribute.
    """
    if name in known:
        full = ".".join([known[name], *attributes])
        if any(f"{full}.".startswith(f"{settable}.") for settable in SETTABLE):
            return ""
        return f"changes {full}"
    if name in ("self", "cls"):  # an attribute of this object, or of an object inside it
        name, attributes = ".".join([name, *attributes[:1]]), attributes[1:]
    if not attributes:
        return ""
    last = attributes[-1]
    if hidden := next((each for each in attributes if private(each)), ""):
        return "" if hidden in declared() | DOCUMENTED.keys() else f"changes {hidden} of {name}"
    if item or name == "ctx":  # torch.autograd.Function passes ctx for that purpose
        return ""
    if last in methods() and last not in protocol():
        return f"replaces the method {last}"
    return "" if last in declared() | DOCUMENTED.keys() | ADDED.keys() else f"sets {last} of {name}"


def protocol() -> frozenset[str]:
    """Return the methods of `Engine` that we add to DeepSpeed's engine."""
    tree = ast.parse((KIT / "spec" / "engine.py").read_text())
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    names = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    return frozenset(
        names & {"accumulate", "before_step", "after_step", "save_states", "load_states"}
    )


def patches(text: str) -> list[str]:
    """Return the patches in a file's text, each with its line and its reason."""
    tree = ast.parse(text)
    known = imported(tree)
    return [
        f"{node.lineno}: {ast.unparse(node)[:60]}: {found}"
        for node, name, attributes in stored(tree)
        if (found := reason(name, attributes, isinstance(node, ast.Subscript), known))
    ]


def test_other_peoples_attributes_are_replaced_in_compat_only():
    found = [
        f"{path.relative_to(ROOT)}:{patch}"
        for path in OUTSIDE
        for patch in patches(path.read_text())
        if f"{path.relative_to(ROOT)}: {patch.split(': ')[1]}" not in OWN
    ]
    assert not found, "give each a function of recipekit/compat:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import shutil\nshutil.copytree = copy",
        "from datasets import config as c\nc.A = c.B = 1",
        "import torch\ntorch.backends.cudnn.benchmark = False",
        "from transformers.initialization import F\nF['a'] = 1",
        "from deepspeed.utils import logger\nlogger.disabled = True",
        "engine._config.train_batch_size = 1",
        "module.forward = f",
        "module.__class__ = f",
        "made.optimizer.step = f",
        "net.named_parameters = f",
        "a, module.forward = 1, f",
        "module._parameters[key] = f",
        "del module._parameters[key]",
        "module._parameters.update(f)",
        "vars(scaler).update(f)",
        "undo(vars(engine).pop('a'))",
        "setattr(module, key, 1)",
        "for module.track_running_stats in (1, 2): pass",
        "backend.build_shm_op = f",
        "x.clip_grad += 1",
    ],
)
def test_a_patch_is_found(line: str) -> None:
    assert len(patches(line)) >= 1, line


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.environ['A'] = '1'",
        "class A:\n  def f(self): self.x = self._y[1] = 2; setattr(self, 'a', 1)",
        "config.use_cache = False",
        "state['step'] = 1",
        "parameter.grad = None",
        "ctx.part = 1",
        "output.state[1] = 2",
    ],
)
def test_other_assignments_are_no_patches(line: str) -> None:
    assert patches(line) == []


def test_what_is_listed_is_assigned():
    """A table row that no file needs must be removed."""
    used: set[str] = set()
    for path in OUTSIDE:
        tree = ast.parse(path.read_text())
        known = imported(tree)
        for _, name, attributes in stored(tree):
            used |= set(attributes)
            used.add(".".join([known.get(name, name), *attributes[:1]]))
    assert {*SETTABLE, *DOCUMENTED, *ADDED} <= used


def functions() -> list[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    return [
        (f"{path.stem}.{node.name}", node)
        for path in sorted(COMPAT.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not private(node.name)
    ]


def labelled(node: ast.FunctionDef | ast.ClassDef) -> dict[str, str]:
    """Return the paragraphs of a docstring that start with a label."""
    found: dict[str, str] = {}
    for paragraph in re.split(r"\n(?=\s*(?:\w+:|\n))", ast.get_docstring(node) or ""):
        label, _, text = " ".join(paragraph.split()).partition(" ")
        if label in LABELS:
            found[label] = text
    return found


@pytest.mark.parametrize(("name", "node"), functions(), ids=[name for name, _ in functions()])
def test_a_patch_says_why_for_which_version_with_which_test_and_until_when(name, node) -> None:
    said = labelled(node)
    assert [label for label in LABELS if not said.get(label)] == [], name
    assert re.search(r"\w+ \d+\.\d+", said["Version:"]), "Version: LIBRARY NUMBER"
    tests = re.findall(r"tests/\S+\.py::\w+", said["Test:"])
    assert tests, "Test: tests/FOLDER/test_FILE.py::test_NAME"
    for test in tests:
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert any(
            isinstance(each, ast.FunctionDef) and each.name == function for each in tree.body
        ), test


def test_compat_imports_nothing_of_ours():
    for path in sorted(COMPAT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & OURS, path


VERSION = re.compile(r"__version__|\bversion\(|Version\(|version_info")


def test_releases_are_told_apart_in_compat_by_feature():
    """A version may appear in files and messages, but no code compares versions, except
    hosts/transformers_release.py, which refuses an old release.
    """
    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(VERSION.search(ast.unparse(side)) for side in (node.left, *node.comparators))
        and "sys.version" not in ast.unparse(node)
    ]
    assert compared == []


def private_names_of_transformers(text: str) -> list[str]:
    """Return the names with an underscore that a file reads from modules of transformers."""
    tree = ast.parse(text)
    found = []
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            found += [alias.name for alias in node.names if private(alias.name)]
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "transformers":
                    modules[alias.asname or "transformers"] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            name, attributes = links(node)
            if name in modules and all(each.islower() for each in attributes):
                found.append(".".join([modules[name], *attributes]))
    return found


def test_no_file_uses_private_names_of_transformers_outside_compat():
    """These names move between releases, and recipekit/compat is where they are looked up."""
    found = {
        str(path.relative_to(ROOT)): names
        for path in OUTSIDE
        if (names := private_names_of_transformers(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from transformers.a import _b", ["_b"]),
        ("from transformers import a\na._b(1)", ["transformers.a._b"]),
        ("import transformers\ntransformers.a._b", ["transformers.a._b"]),
        ("from transformers import A\nA.b", []),
        ("import torch\ntorch._b", []),
        ("import transformers\ntransformers.__version__", []),
    ],
)
def test_a_private_name_of_transformers_is_found(text: str, names: list[str]) -> None:
    assert private_names_of_transformers(text) == names
