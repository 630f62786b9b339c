"""The runner in a module's place: attributes, weights, modes of torch, and a diffusers pipeline."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specgraph as sg

ROWS = sg.TensorLayout("S D")
SAME = sg.TensorLayout("S D", dtype=sg.like("x"))


@sg.graph_break(SAME, inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


class Net(nn.Module):
    """Adds one where it is in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.randn(8))
        self.scale = 3

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """[S 8] to [S 8]."""
        out: Tensor = double(self.linear(x) + self.offset) + int(self.training)
        return out


SPEC = sg.ModelSpec("net", (double.spec,), inputs={"x": ROWS}, outputs=SAME)


@pytest.fixture
def net(device: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().to(device).eval()


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 8, device=device)


def eager(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = net(x)
    return out


def test_the_runner_answers_as_the_module_does(net: Net) -> None:
    runner = sg.GraphRunner(net, SPEC)
    assert isinstance(runner, Net)
    assert isinstance(runner, sg.GraphRunner)
    assert (runner.scale, runner.dtype, runner.linear) == (3, torch.float32, net.linear)
    assert dict(runner.named_parameters()) == dict(net.named_parameters())
    assert runner.state_dict().keys() == net.state_dict().keys()
    assert next(iter(runner.modules())) is net
    assert inspect.signature(runner.forward) == inspect.signature(net.forward)
    assert "scale" in dir(runner)
    runner.scale = 4
    assert net.scale == 4
    del runner.scale
    assert not hasattr(net, "scale")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = runner.nothing


def test_a_runner_in_a_module_is_walked_like_the_module(net: Net) -> None:
    parent = nn.Module()
    parent.add_module("child", sg.GraphRunner(net, SPEC))  # type: ignore[arg-type]  # passes for a module
    assert [name for name, _ in parent.named_parameters()] == ["child.linear.weight", "child.linear.bias"]
    assert parent.state_dict().keys() == {"child.linear.weight", "child.linear.bias", "child.offset"}
    parent.train()
    assert net.training
    parent.double()
    assert net.dtype is torch.float64


def test_methods_that_return_the_module_return_the_runner(net: Net) -> None:
    runner = sg.GraphRunner(net, SPEC)
    for result in (runner.train(), runner.eval(), runner.to(torch.float64), runner.float(), runner.cpu()):
        assert result is runner
    assert net.training is False


def test_forward_is_the_runners_call(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC)
    runner.warmup({"x": x})
    assert torch.equal(runner.forward(x), eager(net, x))
    assert runner.stats.replays == 1


# Weights.


def test_values_written_in_place_are_seen_by_the_next_replay(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC, on_miss="error")
    runner.warmup({"x": x})
    with torch.no_grad():
        net.linear.weight.mul_(2)
    assert torch.equal(runner(x=x), eager(net, x))
    runner.load_state_dict({name: each + 1 for name, each in net.state_dict().items()})
    assert torch.equal(runner(x=x), eager(net, x))


def move(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.clone() + 1


def test_weights_that_moved_make_a_miss(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC)
    for rows in (x, x[:2]):
        runner.warmup({"x": rows})
    move(net)
    assert torch.equal(runner(x=x), eager(net, x))
    assert not runner.captures
    assert runner.stats.misses == {"moved": 1}
    assert torch.equal(runner(x=x[:2]), eager(net, x[:2]))
    runner.warmup({"x": x})
    assert torch.equal(runner(x=x), eager(net, x))
    assert (runner.stats.replays, runner.stats.evictions) == (1, 2)


def test_weights_that_moved_are_captured_again_or_refused(net: Net, x: Tensor) -> None:
    again = sg.GraphRunner(net, SPEC, on_miss="capture")
    refusing = sg.GraphRunner(net, SPEC, on_miss="error")
    for runner in (again, refusing):
        runner.warmup({"x": x})
    move(net)
    for _ in range(2):
        assert torch.equal(again(x=x), eager(net, x))
    assert (again.stats.captures, again.stats.replays) == (2, 2)
    with pytest.raises(sg.MovedWeightError, match=r"parameter 'linear\.weight'"):
        refusing(x=x)


def test_moving_through_the_runner_gives_up_its_captures_at_once(net: Net, x: Tensor) -> None:
    held = {name: each.detach() for name, each in net.named_parameters()}
    runner = sg.GraphRunner(net, SPEC, on_miss="capture")
    runner.warmup({"x": x})
    counts = [len(runner.to(place).captures) for place in (x.device, torch.float64)]
    assert counts == [1, 0]
    assert held
    assert torch.equal(runner(x=x.double()), eager(net, x.double()))


# State that is part of the key.


def test_training_and_evaluation_are_captured_apart(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC, on_miss="capture")
    for mode in (False, True, False, True):
        runner.train(mode)
        assert torch.equal(runner(x=x), eager(net, x))
    assert (runner.stats.captures, runner.stats.misses) == (2, {"uncaptured": 1, "context": 1})
    net.eval()
    refusing = sg.GraphRunner(net, SPEC, on_miss="error")
    refusing.warmup({"x": x})
    net.train()
    with pytest.raises(sg.ReplayError, match="training is True, captured: False"):
        refusing(x=x)


def test_autocast_is_captured_apart_and_leaves_no_casts_behind(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC, on_miss="capture")
    plain = runner(x=x)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert torch.equal(runner(x=x), eager(net, x))
        # A cast that the capture had left in autocast's cache would be in the pool, and stale.
        with torch.no_grad():
            net.linear.weight.mul_(2)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert torch.equal(runner(x=x), eager(net, x))
    with torch.autocast(x.device.type, torch.float16):
        assert torch.equal(runner(x=x), eager(net, x))
    assert torch.equal(runner(x=x), eager(net, x))
    assert not torch.equal(runner(x=x), plain)
    assert runner.stats.captures == 3
    refusing = sg.GraphRunner(net, SPEC, on_miss="error")
    refusing.warmup({"x": x})
    with (
        torch.autocast(x.device.type, torch.bfloat16),
        pytest.raises(sg.ReplayError, match=rf"autocast is bfloat16 on {x.device.type}, captured: off"),
    ):
        refusing(x=x)


def made_here(x: Tensor) -> Tensor:
    return double(x) + torch.ones(8, device=x.device)


def test_the_default_dtype_is_part_of_the_key(x: Tensor) -> None:
    runner = sg.GraphRunner(made_here, sg.ModelSpec("made", ()), on_miss="capture")
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert runner(x=x).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert runner.stats.captures == 2


def test_every_grad_mode_gives_the_same_replay(net: Net, x: Tensor) -> None:
    runner = sg.GraphRunner(net, SPEC, on_miss="capture")
    expected = eager(net, x)
    with torch.inference_mode():
        assert torch.equal(runner(x=x.clone()), expected)
        assert runner(x=x).is_inference()
    with torch.no_grad():
        assert torch.equal(runner(x=x.clone().requires_grad_()), expected)
    out = runner(x=x)
    assert torch.equal(out, expected)
    assert (out.is_inference(), out.requires_grad) == (False, False)
    assert runner.stats.captures == 1
    with pytest.raises(sg.ReplayError, match="requires a gradient"):
        runner(x=x.clone().requires_grad_())
    runner.mode = "eager"
    assert runner(x=x.clone().requires_grad_()).requires_grad


# A diffusers pipeline.


def contiguous_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    out: Tensor = dispatch_attention_fn(query, key, value, *args, **kwargs)
    return out.contiguous()


def attention_spec() -> sg.ModelSpec:
    heads = sg.TensorLayout("B T H D", dtype=sg.like("query"))
    attention = sg.BreakSpec(
        "diffusers.models.attention_dispatch:dispatch_attention_fn",
        heads,
        inputs={"query": sg.TensorLayout("B T H D"), "key": heads, "value": heads},
        body=contiguous_attention,
        name="attention",
    )
    return sg.ModelSpec("flux_tiny", (attention,), eager_only=("aten::*scaled_dot_product*",))


def flux_pipeline() -> Any:
    """FLUX.1 with tiny random components; the tokenizers know letters."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
        T5TokenizerFast,
    )

    torch.manual_seed(0)
    letters = [chr(97 + i) for i in range(26)]
    clip_words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
    t5_pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -1.0), *((e, -2.0) for e in letters)]
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
                hidden_size=32,
                intermediate_size=37,
                num_attention_heads=4,
                num_hidden_layers=2,
                vocab_size=64,
                projection_dim=32,
            )
        ).eval(),
        tokenizer=CLIPTokenizer(
            vocab={word: index for index, word in enumerate(clip_words)}, merges=[], model_max_length=77
        ),
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
        ).eval(),
        tokenizer_2=T5TokenizerFast(vocab=t5_pieces, extra_ids=0, model_max_length=77),
        vae=AutoencoderKL(
            sample_size=32,
            in_channels=3,
            out_channels=3,
            block_out_channels=(4,),
            layers_per_block=1,
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        ).eval(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ).eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def images(pipe: Any, prompt: str, size: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    arguments = {"num_inference_steps": 3, "guidance_scale": 3.5, "max_sequence_length": 16}
    result: Tensor = pipe(
        prompt, height=size, width=size, generator=generator, output_type="pt", **arguments
    ).images
    return result


def test_a_pipeline_runs_from_the_runner_as_from_the_model(device: torch.device, tmp_path: Path) -> None:
    pipe = flux_pipeline().to(device)
    model = pipe.transformer
    expected = {size: images(pipe, "a b", size) for size in (8, 16)}
    runner = sg.GraphRunner(model, attention_spec(), on_miss="capture")
    pipe.transformer = runner
    assert pipe.transformer is runner
    assert pipe.config["transformer"] == ("diffusers", "FluxTransformer2DModel")
    for size in (8, 16, 8):
        assert torch.equal(images(pipe, "a b", size), expected[size])
    assert not torch.equal(images(pipe, "c d", 8), expected[8])
    assert (runner.stats.captures, runner.stats.replays) == (2, 12)
    assert sum(runner.stats.misses.values()) == 2
    assert runner.captures[0].graph.num_segments == 3
    assert pipe.components["transformer"] is runner
    assert pipe.to(device).transformer is runner
    assert pipe.dtype is torch.float32
    pipe.save_pretrained(tmp_path)
    assert (tmp_path / "transformer" / "config.json").exists()
    loaded = type(model).from_pretrained(tmp_path / "transformer")
    assert loaded.state_dict().keys() == model.state_dict().keys()
