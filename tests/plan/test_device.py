# SPDX-License-Identifier: Apache-2.0
"""The times of an accelerator's work are those worked out by hand, and more work never takes less time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.models import MODELS
from recipe.plan.device import H100, DeviceProfile, DeviceTimes, active_parameters
from recipe.plan.memory.shape import shape_of

# A model that is small enough to count by hand.
SMALL = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 4,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": True,
    }
)
ROUND = DeviceProfile(
    name="round",
    flops=1000.0,
    memory_bandwidth=100.0,
    link_bandwidth=10.0,
    link_latency_s=0.5,
    decode_efficiency=0.5,
    prefill_efficiency=0.5,
    training_efficiency=0.25,
    link_efficiency=0.5,
    step_overhead_s=0.25,
    update_overhead_s=2.0,
)
# A layer has 152 parameters: attention with 2*4*(4+2) = 48, two norms of 4, an MLP with 3*4*8 = 96. Three have 456.
LAYERS, EMBEDDING, NORM = 456, 40, 4
TIMES = DeviceTimes(ROUND, SMALL)


def test_a_decode_step_reads_weights_and_cache_once() -> None:
    # A token has 2 * 3 layers * width 2 * 2 bytes = 24 bytes of keys and values. A step reads 496 * 2 + 10 * 24 = 1232
    # bytes at 50 bytes/s. Its arithmetic takes less: 2 * 496 + 4 * 3 * 4 * 10 = 1472 FLOPs at 500 FLOP/s.
    assert TIMES.token_cache_bytes == 24
    assert TIMES.decode_step_s(1, 10) == pytest.approx(1232 / 50 + 0.25)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    # 100 sequences take 100 * 2 * 496 = 99,200 FLOPs at 500 FLOP/s, longer than 992 bytes at 50 bytes/s.
    assert TIMES.decode_step_s(100, 0) == pytest.approx(99_200 / 500 + 0.25)


def test_prefill_log_probs_and_update_count_the_flops_of_a_sequence() -> None:
    # 6 tokens take 6 * 2 * 496 + 48 * 18 pairs = 6816 FLOPs.
    assert TIMES.prefill_s(6) == pytest.approx(6816 / 500 + 0.25)
    assert TIMES.log_probs_s([6, 6]) == pytest.approx(2 * 6816 / 500)
    # Two tokens after four in the cache take 2 * 2 * 496 + 48 * (2*4 + 2) FLOPs.
    assert TIMES.prefill_s(2, 4) == pytest.approx((1984 + 480) / 500 + 0.25)
    # An update takes three forward passes at 250 FLOP/s; AdamW moves 28 bytes for each of 500 parameters at 100 B/s.
    assert TIMES.update_s([6, 6]) == pytest.approx(3 * 2 * 6816 / 250 + 28 * 500 / 100 + 2.0)


def test_transfers_take_bytes_over_links() -> None:
    assert TIMES.model_bytes == 2 * (LAYERS + EMBEDDING + NORM) == 1000
    assert TIMES.transfer_s() == pytest.approx(1000 / 5 + 0.5)
    assert TIMES.transfer_s(250, links=2) == pytest.approx(25 + 0.5)
    assert TIMES.load_s() == pytest.approx(2 * 1000 / 50)


def test_devices_share_the_work_and_not_the_overhead() -> None:
    two = replace(TIMES, devices=2)
    assert two.decode_step_s(1, 10) == pytest.approx(1232 / 100 + 0.25)
    assert two.prefill_s(6) == pytest.approx(6816 / 1000 + 0.25)
    assert two.log_probs_s([6]) == pytest.approx(6816 / 1000)


def test_experts_are_read_as_far_as_tokens_need_them() -> None:
    moe = shape_of(MODELS["qwen3-30b-a3b"])
    assert moe is not None
    # By its card the model has 30.5B parameters, 3.3B of them active; the input's lookup is not counted here.
    assert moe.parameters == pytest.approx(30.5e9, rel=0.01)
    assert active_parameters(moe) + moe.embedding == pytest.approx(3.35e9, rel=0.01)
    times = replace(TIMES, shape=moe, device=replace(H100, step_overhead_s=0.0))
    alone = times.decode_step_s(1, 0)
    assert alone == pytest.approx(2 * active_parameters(moe) / (3.35e12 * 0.7))
    # 64 sequences read 1 - (15/16)^64 = 98.4% of the experts.
    rest = moe.layer_parameters + moe.embedding
    assert times.decode_step_s(64, 0) == pytest.approx(
        2 * (rest + moe.expert_parameters * (1 - (15 / 16) ** 64)) / (3.35e12 * 0.7)
    )


def test_a_7b_model_on_an_h100() -> None:
    shape = shape_of(MODELS["qwen2.5-7b"])
    assert shape is not None
    times = DeviceTimes(H100, shape)
    assert shape.parameters == 7_615_616_512
    assert times.token_cache_bytes == 57_344
    # 14.1 GB of weights without the lookup and 64 x 4,096 tokens of 57 KB are 29.2 GB at 2.345 TB/s; 2 ms come on top.
    assert times.decode_step_s(64, 64 * 4096) == pytest.approx(0.01443, rel=0.002)
    # The transfer takes 15.23 GB at 40 GB/s, and 20 ms.
    assert times.transfer_s() == pytest.approx(0.4008, rel=0.001)


def test_a_token_may_stand_for_many_and_time_be_scaled() -> None:
    coarse = replace(TIMES, token_scale=8)
    assert coarse.decode_step_s(2, 5) == pytest.approx(8 * TIMES.decode_step_s(2, 40))
    assert coarse.prefill_s(3) == pytest.approx(TIMES.prefill_s(24))
    assert coarse.update_s([2, 3]) == pytest.approx(TIMES.update_s([16, 24]))
    assert coarse.transfer_s() == TIMES.transfer_s()
    fast = replace(TIMES, time_scale=0.1)
    assert fast.decode_step_s(2, 5) == pytest.approx(0.1 * TIMES.decode_step_s(2, 5))
    assert fast.update_s([6]) == pytest.approx(0.1 * TIMES.update_s([6]))
    assert fast.transfer_s() == pytest.approx(0.1 * TIMES.transfer_s())


def test_nothing_to_do_takes_no_time() -> None:
    assert TIMES.decode_step_s(0, 0) == TIMES.prefill_s(0) == TIMES.log_probs_s([]) == 0.0


counts = st.integers(1, 4096)


@given(model=st.sampled_from(sorted(MODELS)), batch=counts, context=counts, more=counts, devices=st.integers(1, 8))
def test_more_work_never_takes_less_time(model: str, batch: int, context: int, more: int, devices: int) -> None:
    shape = shape_of(MODELS[model])
    assert shape is not None
    times = DeviceTimes(H100, shape, devices=devices)
    assert times.decode_step_s(batch + more, context) >= times.decode_step_s(batch, context) > 0
    assert times.decode_step_s(batch, context + more) > times.decode_step_s(batch, context)
    assert times.prefill_s(batch + more, context) > times.prefill_s(batch, context)
    assert times.prefill_s(batch, context + more) > times.prefill_s(batch, context)
    assert times.update_s([batch, more]) > times.update_s([batch])
    assert times.log_probs_s([batch, more]) > times.log_probs_s([batch])
    assert times.transfer_s(context + more) > times.transfer_s(context)
    assert replace(times, devices=devices + 1).decode_step_s(batch, context) < times.decode_step_s(batch, context)


@pytest.mark.parametrize(
    ("field", "value"),
    [("flops", 0.0), ("decode_efficiency", 1.5), ("training_efficiency", 0.0), ("link_latency_s", -1.0)],
)
def test_a_profile_that_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"(?s)DeviceProfile.{field}.*Input should be .* than"):
        replace(ROUND, **{field: value})


@pytest.mark.parametrize("field", ["devices", "token_scale", "time_scale", "weight_bytes"])
def test_times_that_cannot_be_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"DeviceTimes.{field}=0 is not allowed: it must be above 0"):
        replace(TIMES, **{field: 0})
