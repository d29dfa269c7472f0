"""The routed experts with 4-bit weights, against float32 in plain torch."""

from dataclasses import replace

import pytest
import torch

from dsv4doctor.kernels import moe_cases, moe_compile, moe_launch
from dsv4doctor.kernels.moe_cases import Layer
from dsv4doctor.kernels.moe_mxfp4 import mxfp4_moe
from dsv4doctor.kernels.moe_nvfp4 import nvfp4_moe
from dsv4doctor.kernels.reference import moe_mxfp4, moe_nvfp4

BAR = 1e-2
SMALL = Layer("small", 5, 3, 96, 64)

both = pytest.mark.parametrize("group", [32, 16], ids=["mxfp4", "nvfp4"])


class Case:
    """Fresh inputs of one layer and one batch."""

    def __init__(self, device, group, layer=SMALL, tokens=9):
        self.experts = moe_cases.random_experts(layer, group, device)
        self.ids, self.weights = moe_cases.random_routing(layer, tokens, device)
        self.x = torch.randn((tokens, layer.hidden), device=device).bfloat16()

    def tensors(self):
        e = self.experts
        if e.group == 32:
            return (e.w13, e.w13_scale, e.w2, e.w2_scale)
        return (e.w13, e.w13_scale, e.w13_global, e.w2, e.w2_scale, e.w2_global)

    def run(self, **options):
        launch = mxfp4_moe if self.experts.group == 32 else nvfp4_moe
        out = torch.full_like(self.x, float("nan"))
        given = launch(self.x, *self.tensors(), self.ids, self.weights, out=out, **options)
        assert given is out
        return out

    def wanted(self, **options):
        launch = moe_mxfp4.mxfp4_moe if self.experts.group == 32 else moe_nvfp4.nvfp4_moe
        return launch(self.x, *self.tensors(), self.ids, self.weights, **options)

    def error(self, **options):
        return moe_cases.relative_error(self.run(**options), self.wanted(**options))


@both
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_batches(group, tokens, device):
    assert Case(device, group, tokens=tokens).error(swiglu_limit=10.0) < BAR


@both
@pytest.mark.parametrize(
    "layer",
    [Layer("", 3, 2, 32, 32), Layer("", 4, 2, 160, 96), Layer("", 2, 1, 96, 288)],
    ids=lambda layer: f"H{layer.hidden}-I{layer.intermediate}",
)
def test_sizes_of_no_blocks_multiple(group, layer, device):
    assert Case(device, group, layer, 5).error() < BAR


@both
def test_more_pairs_than_one_chunk(group, device):
    layer = Layer("", 6, 6, 32, 32)
    assert Case(device, group, layer, moe_launch.CHUNK // 6 + 20).error() < BAR


@both
def test_the_limit_clamps_gate_above_and_up_on_both_sides(group, device):
    case = Case(device, group)
    case.x *= 20
    assert case.error(swiglu_limit=1.5) < BAR
    assert moe_cases.relative_error(case.run(swiglu_limit=1.5), case.wanted()) > 0.1


@both
def test_absent_experts_contribute_nothing_and_weights_there_do_not_matter(group, device):
    case = Case(device, group)
    case.ids[:, 1] = -1
    case.ids[4] = -1
    case.weights[case.ids < 0] = float("nan")
    out = case.run()
    assert out[4].eq(0).all()
    case.weights.nan_to_num_()
    assert moe_cases.relative_error(out, case.wanted()) < BAR


@both
def test_ids_are_counted_from_the_offset(group, device):
    case = Case(device, group)
    case.ids += 7
    case.ids[0] = torch.tensor([6, 7, 12], device=device)
    assert case.error(expert_offset=7) < BAR


@both
def test_an_expert_named_twice_counts_twice(group, device):
    case = Case(device, group)
    case.ids[:] = 2
    assert case.error() < BAR


@both
def test_the_factor_scales_the_sum(group, device):
    assert Case(device, group).error(factor=2.5) < BAR


@both
def test_ids_of_64_bits_and_rows_apart(group, device):
    case = Case(device, group)
    case.ids = case.ids.long()
    case.x = torch.cat((case.x, case.x), dim=1)[:, : SMALL.hidden]
    assert case.error() < BAR


@both
def test_no_tokens(group, device):
    case = Case(device, group, tokens=2)
    case.x, case.ids, case.weights = case.x[:0], case.ids[:0], case.weights[:0]
    assert case.run().shape == (0, SMALL.hidden)


@both
def test_a_nan_scale_reaches_the_tokens_of_its_expert_and_no_other(group, device):
    case = Case(device, group)
    nan = 255 if group == 32 else 127
    case.experts.w2_scale.view(torch.uint8)[1, 5, 0] = nan
    out = case.run()
    named = (case.ids == 1).any(dim=1)
    assert named.any()
    assert not named.all()
    assert torch.equal(out.isnan().any(dim=1), named)
    assert out[:, 5].isnan().equal(named)


def test_scales_at_both_ends_of_ue8m0(device):
    case = Case(device, 32)
    case.experts.w13_scale[:] = torch.randint(0, 2, case.experts.w13_scale.shape).to(device)
    case.experts.w2_scale[:] = 240
    case.x *= 2.0**70
    assert case.error() < BAR


def test_scales_at_both_ends_of_e4m3(device):
    case = Case(device, 16)
    ends = torch.tensor([0x01, 0x07, 0x08, 0x7E], dtype=torch.uint8)
    pick = torch.randint(0, 4, case.experts.w13_scale.shape)
    case.experts.w13_scale.view(torch.uint8)[:] = ends[pick].to(device)
    assert case.error() < BAR


def test_the_promise_of_small_scales_changes_nothing(device):
    case = Case(device, 32)
    assert torch.equal(case.run(small_scales=True), case.run())


@both
def test_a_captured_call_follows_its_inputs(group, device):
    assert moe_cases.replay_error(SMALL, group, 7, device) < BAR


@both
@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "sm_121"])
def test_each_configuration_is_compiled_once(group, arch):
    names = [case.name for case in moe_compile.compile_cases(group, arch)]
    assert names
    assert len(names) == len(set(names))


def test_every_launch_of_a_call_is_compiled():
    """The routing places as many pairs as are offered on the arch, and no more."""
    kernels = {case.kernel for case in moe_compile.compile_cases(32, "sm_120")}
    assert {k.__name__ for k in kernels} == {
        "_count_kernel", "_route_kernel", "_product_kernel", "_sum_kernel",
    }  # fmt: skip
    for arch, own in (("sm_90", 64), ("sm_120", 32), ("sm_121", 32)):
        cases = moe_compile.compile_cases(32, arch)
        owns = [case.constexprs["OWN"] for case in cases if case.constexprs.get("COUNTED")]
        assert owns == [own]


def test_an_output_whose_rows_are_apart_is_refused(device):
    case = Case(device, 32)
    out = torch.empty(case.x.shape[::-1], dtype=torch.bfloat16, device=device).T
    with pytest.raises(ValueError, match="stride of 9"):
        mxfp4_moe(case.x, *case.tensors(), case.ids, case.weights, out=out)


def test_no_configuration_for_an_unknown_arch():
    assert moe_compile.compile_cases(32, "sm_100") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "x", c.x.float()), "x is torch.float32"),
        (lambda c: setattr(c, "x", c.x[:, :64]), "x has shape"),
        (lambda c: setattr(c, "ids", c.ids[:3]), "topk_ids has shape"),
        (lambda c: setattr(c, "weights", c.weights.bfloat16()), "topk_weights is"),
        (
            lambda c: setattr(c, "experts", replace(c.experts, w2=c.experts.w2[:, :, :16])),
            "w2 has shape",
        ),
        (
            lambda c: setattr(
                c, "experts", replace(c.experts, w13_scale=c.experts.w13_scale.float())
            ),
            "w13_scale is torch.float32",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, message, device):
    case = Case(device, 32)
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run()
