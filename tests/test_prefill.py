"""Bucketed prefill of Hugging Face models into a static cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import specgraph as sg
from specgraph.verify import BuiltPreset, build_preset, plan_preset, verify
from specs._prefill import Prefill, causal_attention, run_unedited

SPECS = Path(__file__).parents[1] / "specs"
LLAMA = sg.load_spec(SPECS / "llama_prefill.py")
QWEN3 = sg.load_spec(SPECS / "qwen3_prefill.py")
BUCKET = 64

both = pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda spec: spec.name)


def built(spec: sg.ModelSpec, device: torch.device, **dims: int) -> tuple[BuiltPreset, Prefill]:
    preset = build_preset(spec.presets["tiny"], dims, device)
    assert isinstance(preset.fn, Prefill)
    return preset, preset.fn


def prompt_of(example: sg.Example) -> Tensor:
    prompt: Tensor = example.inputs["input_ids"][:, : example.live["S"]]
    return prompt


@both
@pytest.mark.parametrize("length", [1, 37, BUCKET])
def test_replays_equal_eager_and_a_full_bucket_the_unedited_model(
    device: torch.device, spec: sg.ModelSpec, length: int
) -> None:
    report = verify(spec, spec.presets["tiny"], dims={"length": length}, device=device, replays=2)
    assert [each.difference for each in report.rounds] == [None, None]
    assert report.has_reference == (length == BUCKET)
    assert (report.num_segments, len(report.plan.breaks)) == (4, 3)
    assert report.rounds[0].live == {"S": str(length)}


@both
def test_one_capture_serves_prompts_of_changing_length(device: torch.device, spec: sg.ModelSpec) -> None:
    report = verify(spec, spec.presets["tiny"], dims={"bucket": 32}, device=device, replays=5, poison=True)
    assert report.passed
    assert len({each.live["S"] for each in report.rounds}) > 1


@both
@torch.no_grad()
def test_the_cache_holds_the_keys_of_the_last_prompt(device: torch.device, spec: sg.ModelSpec) -> None:
    preset, step = built(spec, device)
    first = preset.example(seed=0)
    captured = sg.capture(step, spec, first.inputs, first.live)
    assert captured.leaks == ()
    # The shorter prompt comes second: nothing of the longer one may be left where it is read.
    for seed in sorted((1, 2), key=lambda seed: -preset.example(seed).live["S"]):
        example = preset.example(seed)
        logits = captured(live=example.live, **example.inputs)
        prompt = prompt_of(example)
        own = DynamicCache(config=step.model.config)
        torch.testing.assert_close(logits, run_unedited(step.model, prompt), rtol=0.05, atol=0.05)
        step.model(prompt, None, None, own)
        for ours, theirs in zip(step.cache.layers, own.layers, strict=True):
            rows = slice(example.live["S"])
            torch.testing.assert_close(ours.keys[:, :, rows], theirs.keys, rtol=0.05, atol=0.05)
            torch.testing.assert_close(ours.values[:, :, rows], theirs.values, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_padding_tokens_do_not_matter(device: torch.device) -> None:
    preset, step = built(LLAMA, device, length=20)
    example = preset.example(seed=1)
    captured = sg.capture(step, LLAMA, example.inputs, example.live)
    other = {**example.inputs, "input_ids": example.inputs["input_ids"].clone()}
    other["input_ids"][:, 20:] = 7
    logits = [captured(live=example.live, **inputs) for inputs in (example.inputs, other)]
    assert torch.equal(*logits)
    other["input_ids"][:, 19] = 7
    assert not torch.equal(logits[0], captured(live=example.live, **other))


def test_attention_runs_over_the_live_rows_alone(device: torch.device) -> None:
    query = torch.randn(1, 4, 8, 16, device=device)
    key, value = torch.randn(2, 1, 2, 12, 16, device=device)
    alone = causal_attention(query[:, :, :5], key[:, :, :5], value[:, :, :5], None)
    for tensor in (query, key, value):
        tensor[:, :, 5:] = float("nan")
    out = torch.full((1, 8, 4, 16), 7.0, device=device)
    causal_attention(query, key, value, None, length=5, out=out)
    assert torch.equal(out[:, :5], alone)
    assert bool((out[:, 5:] == 7).all())


@pytest.mark.parametrize(("spec", "layers", "vocab"), [(LLAMA, 32, 128256), (QWEN3, 36, 151936)])
def test_the_plan_of_the_published_size(spec: sg.ModelSpec, layers: int, vocab: int) -> None:
    plan = plan_preset(spec, build_preset(spec.presets["full"], {}))
    assert (len(plan.segments), len(plan.breaks)) == (layers + 1, layers)
    for index, step in enumerate(plan.breaks):
        assert step.dims == {"B": 1, "H": 32, "S": 2048, "D": 128, "G": 8, "M": 4096}
        assert {use.name: str(use.provenance) for use in step.tensors} == {
            "query": f"segment {2 * index}",
            "key": f"parameter cache_{index}_keys",
            "value": f"parameter cache_{index}_values",
        }
        assert [(value.name, value.live) for value in step.values if value.live] == [("length", "S")]
    # The executor copies nothing, and the logits are the last row's.
    assert plan.memory.copied_at_breaks == 0
    assert plan.memory.copied_out == vocab * 2
    cache_nbytes = layers * 2 * 8 * 4096 * 128 * 2
    assert 15e9 < plan.memory.parameters - cache_nbytes < 16.5e9
    assert plan.memory.externals == 0
    assert plan.diagnostics == ()


def test_another_bucket_is_another_plan() -> None:
    preset = LLAMA.presets["full"]
    small, large = (
        plan_preset(LLAMA, build_preset(preset, {"bucket": bucket})).memory for bucket in (512, 2048)
    )
    assert small.pool_peak < large.pool_peak
    assert small.parameters == large.parameters
