"""Which of diffusers' transformers the common attention break serves, as a Markdown table.

Every model class under `diffusers.models.transformers` has a row. A class with a recipe in
`diffusers_coverage.json` is built small, with random weights, and captured as it is, on the CPU:

- `verified`: replays on fresh inputs equal eager bit for bit.
- `planned`: the plan breaks at attention, but the capture is refused or a replay differs; the row says why.
- `not`: neither; the row says why.

A recipe has the constructor's arguments (`config`) and the keyword arguments of `forward` (`inputs`). In
these, text such as `float32[1 24 16]` stands for a random tensor of that layout, and
`{"values": ..., "dtype": ...}` for the same tensor every time.

    python -m scripts.diffusers_coverage [--only CLASS] [--write]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import attrs
import diffusers
import torch
from diffusers.models import transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from torch.utils import _pytree as pytree

import specgraph as sg
from specs._diffusion_attention import ATTENTION, EAGER_ONLY

ROOT = Path(__file__).parents[1]
RECIPES = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "models-diffusers.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"
FUNCTION = "dispatch_attention_fn"
LONGEST_REASON = 160


@attrs.frozen
class Found:
    """A model class of diffusers.

    Args:
        file: the file that defines it, without its suffix.
        cls: the class; None where the file defines no model.
        calls: the file calls `dispatch_attention_fn`.
    """

    file: str
    cls: type[nn.Module] | None
    calls: bool

    @property
    def name(self) -> str:
        return self.cls.__name__ if self.cls else ""


@attrs.frozen
class Recipe:
    """How to build a class small, and what to call it with; see the module."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Any]


@attrs.frozen
class Result:
    """What became of a class: a status, the breaks of its plan, and why it is no better."""

    status: str
    breaks: int = 0
    reason: str = ""


def find_models() -> Iterator[Found]:
    """Every model class that a file under `diffusers.models.transformers` defines, in the files' order."""
    for file in sorted(each.name for each in pkgutil.iter_modules(transformers.__path__)):
        module = importlib.import_module(f"{transformers.__name__}.{file}")
        calls = f"{FUNCTION}(" in inspect.getsource(module)
        models = [each for each in vars(module).values() if _is_model(each, module.__name__)]
        if not models:
            yield Found(file, None, calls)
        for cls in models:
            yield Found(file, cls, calls)


def _is_model(value: Any, module: str) -> TypeGuard[type[nn.Module]]:
    return inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module


def read_recipes() -> dict[str, Recipe]:
    """The recipes, by class."""
    return {name: Recipe(**entry) for name, entry in json.loads(RECIPES.read_text()).items()}


def build(cls: type[nn.Module], recipe: Recipe) -> nn.Module:
    """The model with random weights, also where its constructor makes them zero."""
    torch.manual_seed(0)
    parameters = inspect.signature(cls.__init__).parameters
    config = {
        name: tuple(value) if isinstance(parameters[name].default, tuple) else value
        for name, value in recipe.config.items()
    }
    model = cls(**config).eval()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def make_inputs(cls: type[nn.Module], recipe: Recipe, seed: int) -> dict[str, Any]:
    """Keyword arguments with random tensors: integers are 0 or 1, and masks begin with True."""
    generator = torch.Generator().manual_seed(seed)
    inputs = pytree.tree_map(lambda leaf: _made(leaf, generator), dict(recipe.inputs), is_leaf=_is_fixed)
    if "return_dict" in inspect.signature(cls.forward).parameters:
        inputs["return_dict"] = False
    return dict(inputs)


def _is_fixed(leaf: Any) -> bool:
    return isinstance(leaf, dict) and set(leaf) == {"values", "dtype"}


def _made(leaf: Any, generator: torch.Generator) -> Any:
    if _is_fixed(leaf):
        return torch.tensor(leaf["values"], dtype=getattr(torch, leaf["dtype"]))
    if not isinstance(leaf, str) or "[" not in leaf:
        return leaf
    layout = sg.TensorLayout.parse(leaf).resolve({}, {})
    if layout.dtype.is_floating_point:
        return torch.randn(layout.shape, generator=generator, dtype=layout.dtype)
    values = torch.randint(0, 2, layout.shape, generator=generator)
    if layout.dtype is torch.bool:
        values[..., 0] = 1
    return values.to(layout.dtype)


def attempt(cls: type[nn.Module], recipe: Recipe) -> Result:
    """Capture a class and compare replays with eager; where that fails, plan it."""
    spec = sg.ModelSpec(cls.__name__, (ATTENTION,), eager_only=EAGER_ONLY)
    first = make_inputs(cls, recipe, seed=0)
    try:
        model = build(cls, recipe)
        with torch.no_grad():
            model(**first)
    except Exception as error:  # noqa: BLE001  # whatever it is, the table says it
        return Result("not", reason=f"its recipe does not run: {_in_short(error)}")
    try:
        captured = sg.capture(model, spec, first)
        reason = compare(captured, model, cls, recipe)
        return Result("planned" if reason else "verified", len(captured.plan.breaks), reason)
    except Exception as error:  # noqa: BLE001  # as above
        reason = _in_short(error)
    try:
        return Result("planned", len(sg.plan(build(cls, recipe), spec, first).breaks), reason)
    except Exception as error:  # noqa: BLE001  # as above
        return Result("not", reason=_in_short(error))


def compare(captured: sg.CapturedGraph, model: nn.Module, cls: type[nn.Module], recipe: Recipe) -> str:
    """How replays on fresh inputs differ from eager; empty where they do not."""
    seen = []
    for seed in (1, 2):
        inputs = make_inputs(cls, recipe, seed)
        with torch.no_grad():
            expected = pytree.tree_leaves(model(**inputs))
        replayed = pytree.tree_leaves(captured(**inputs))
        if not all(map(torch.equal, replayed, expected)):
            return "a replay differs from eager"
        seen.append(replayed)
    if not all(bool(each.isfinite().all()) for each in seen[0]) or all(map(torch.equal, *seen)):
        return "the outputs say nothing: they are not finite, or the same for other inputs"
    return ""


def _in_short(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    text = re.sub(r" at 0x[0-9a-f]+|^spec '\w+': ", "", re.sub(r"\s+", " ", text)).replace("|", "\\|")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def examine(found: Found, recipes: Mapping[str, Recipe]) -> Result:
    """The result of a class, with a recipe or without."""
    if found.cls is None:
        return Result("not", reason="defines no model class")
    if found.name in recipes:
        return attempt(found.cls, recipes[found.name])
    if not found.calls:
        return Result("not", reason=f"does not call `{FUNCTION}`")
    parameters = [*inspect.signature(found.cls.forward).parameters.values()][1:]
    needed = [f"`{each.name}`" for each in parameters if each.default is each.empty]
    return Result("not", reason=f"needs inputs this script has no recipe for: {', '.join(needed)}")


def spec_files() -> dict[str, str]:
    """The spec files that name a class, by class."""
    texts = {path: path.read_text() for path in sorted((ROOT / "specs").glob("*.py"))}
    names = {each.name for each in find_models() if each.cls}
    return {
        name: ", ".join(f"`{path.name}`" for path, text in texts.items() if re.search(rf"\b{name}\b", text))
        for name in names
    }


def table(results: list[tuple[Found, Result]]) -> str:
    """The table and a line about it."""
    counts = {
        status: sum(result.status == status for _, result in results) for status in ("verified", "planned")
    }
    calling = len({found.file for found, _ in results if found.calls})
    specs = spec_files()
    lines = [
        f"torch {torch.__version__.partition('+')[0]}, diffusers {diffusers.__version__}, CPU, float32. "
        f"{calling} files call `{FUNCTION}`; of {len(results)} classes {counts['verified']} are verified and "
        f"{counts['planned']} planned only.",
        "",
        "| file | class | status | breaks | spec file | why not |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for found, result in results:
        cells = (
            f"`{found.file}`",
            f"`{found.name}`" if found.cls else "",
            result.status,
            str(result.breaks or ""),
            specs.get(found.name, ""),
            result.reason,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table between the page's markers."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which of diffusers' transformers the common break serves.")
    parser.add_argument("--only", action="append", metavar="CLASS", help="examine these classes alone")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write needs all classes")
    recipes = read_recipes()
    results = []
    for found in find_models():
        if not arguments.only or found.name in arguments.only:
            results.append((found, examine(found, recipes)))
            sys.stderr.write(f"{found.name or found.file}: {results[-1][1].status}\n")
    text = table(results)
    if arguments.write:
        write(text)
    else:
        sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
