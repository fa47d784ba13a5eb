"""Parameters over servers: small vectors by hand, ResNet-50 against the reference figures, properties."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shoal.core.errors import ShoalError
from shoal.placement.parameter_assignment import balanced, mxnet, round_robin


def resnet50() -> list[int]:
    """Elements of each parameter block of ResNet-50 with pre-activation (157 blocks), in order of use."""

    def norm(channels: int) -> list[int]:
        return [channels, channels]

    blocks = [*norm(3), 3 * 64 * 7 * 7, *norm(64)]
    channels = 64
    for units, out in [(3, 256), (4, 512), (6, 1024), (3, 2048)]:
        for unit in range(units):
            narrow = out // 4
            blocks += [*norm(channels), channels * narrow]
            blocks += [*norm(narrow), narrow * narrow * 9]
            blocks += [*norm(narrow), narrow * out]
            if unit == 0:
                blocks.append(channels * out)
            channels = out
    return [*blocks, *norm(2048), 2048 * 1000, 1000]


def test_the_blocks_of_resnet_50_are_those_of_the_architecture():
    blocks = resnet50()
    assert len(blocks) == 157
    assert 25.5e6 < sum(blocks) < 25.6e6


@pytest.mark.parametrize(
    ("assign", "difference", "requests"),
    [(mxnet, 1_141_245, 247), (round_robin, 4_136_576, 157), (balanced, 104_576, 157)],
    ids=["mxnet", "tensorflow", "optimus"],
)
def test_resnet_50_on_ten_servers_as_in_the_reference(assign, difference, requests):
    result = assign(resnet50(), 10)
    assert (result.max_load_difference, result.total_requests) == (difference, requests)


def vgg11() -> list[int]:
    """Weights and biases of VGG with 11 layers (22 blocks), in order of use."""
    shapes = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 512), (512, 512)]
    blocks = [n for i, o in shapes for n in (i * o * 9, o)]
    return blocks + [n for i, o in [(25088, 4096), (4096, 4096), (4096, 1000)] for n in (i * o, o)]


@pytest.mark.parametrize(
    ("assign", "difference", "requests"),
    [(mxnet, 589_820, 85), (round_robin, 103_349_632, 22), (balanced, 122_301, 30)],
    ids=["mxnet", "tensorflow", "optimus"],
)
def test_vgg_on_ten_servers_as_in_the_reference(assign, difference, requests):
    result = assign(vgg11(), 10)
    assert (result.max_load_difference, result.total_requests) == (difference, requests)


def test_a_block_that_fits_goes_where_least_is_left():
    # avg 10; 7 and 6 open two servers, 4 best-fits beside 6 (exactly full), 3 beside 7.
    result = balanced([7, 6, 4, 3], 2)
    assert result.load.tolist() == [10, 10]
    assert result.pieces == ((0, 0, 7), (1, 1, 6), (2, 1, 4), (3, 0, 3))


def test_a_block_above_the_average_is_sliced_up_to_the_average():
    result = balanced([25, 5], 3)
    assert result.load.tolist() == [10, 10, 10]
    assert result.pieces == ((0, 0, 10), (0, 1, 10), (0, 2, 5), (1, 2, 5))


def test_tiny_blocks_go_by_number_of_requests():
    result = balanced([1000, 500, 500, 1, 1, 1], 2)
    assert result.requests.tolist() == [3, 3]


def test_mxnet_cuts_large_blocks_over_all_servers_and_hashes_small_ones():
    result = mxnet([2_000_000, 10], 4)
    assert result.load.tolist() == [500_000, 500_000 + 10, 500_000, 500_000]  # 9973 mod 4 = 1
    assert result.total_requests == 5


@given(blocks=st.lists(st.integers(1, 5000), min_size=1, max_size=60), servers=st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_the_load_is_even_to_within_the_largest_whole_block(blocks, servers):
    result = balanced(blocks, servers)
    assert result.load.sum() == sum(blocks)
    per_block = np.zeros(len(blocks), int)
    for block, _, elements in result.pieces:
        assert elements > 0
        per_block[block] += elements
    assert per_block.tolist() == blocks
    average = sum(blocks) / servers
    tiny = sum(b for b in blocks if b <= 0.01 * average)
    whole = max((b for b in blocks if b <= average), default=0)
    assert result.load.max() <= average + max(whole, 1) + tiny + servers
    assert result.total_requests <= len(blocks) + servers * sum(b > average for b in blocks)


@pytest.mark.parametrize(("blocks", "servers"), [([], 2), ([0, 3], 2), ([5], 0)])
def test_impossible_input_is_refused(blocks, servers):
    with pytest.raises(ShoalError):
        balanced(blocks, servers)
