"""Bytes on the wire: scalar, array and inverse, and the separate figure of reserved bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prfaas_env.profiles.catalogue import load_model
from prfaas_env.profiles.kv import EVERY_LENGTH, KVLayout, WindowGroup

windows = st.lists(
    st.builds(
        WindowGroup,
        bytes_per_token=st.integers(0, 500_000),
        window_tokens=st.integers(1, 200_000),
    ),
    max_size=4,
).map(tuple)
layouts = st.builds(
    KVLayout,
    fixed_bytes=st.integers(0, 10**9),
    bytes_per_token=st.integers(0, 500_000),
    windows=windows,
    n_layers=st.integers(1, 100),
)


def test_hand_computed_bytes() -> None:
    layout = KVLayout(
        fixed_bytes=1000,
        bytes_per_token=10,
        windows=(
            WindowGroup(bytes_per_token=3, window_tokens=4),
            WindowGroup(bytes_per_token=5, window_tokens=2),
        ),
        n_layers=3,
    )
    # 0: the state alone; 1: + 18; 2: + 36; 3: + 30 + 9 + 10; 4: + 40 + 12 + 10; 10: + 100 + 12 + 10.
    assert [layout.transfer_bytes(n) for n in (0, 1, 2, 3, 4, 10)] == [1000, 1018, 1036, 1049, 1062, 1122]


@given(layouts, st.lists(st.integers(0, 2_000_000), max_size=20))
def test_array_equals_scalar(layout: KVLayout, tokens: list[int]) -> None:
    lengths = np.array(tokens, dtype=np.int64)
    result = layout.transfer_bytes_array(lengths)
    assert result.dtype == np.int64
    assert result.tolist() == [layout.transfer_bytes(n) for n in tokens]


def test_array_keeps_shape() -> None:
    lengths = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert load_model("mimo-v2-flash").kv.transfer_bytes_array(lengths).shape == (2, 3)


@given(layouts, st.integers(0, 10**12))
def test_inverse_is_the_largest_length_that_fits(layout: KVLayout, n_bytes: int) -> None:
    tokens = layout.tokens_for_bytes(n_bytes)
    if n_bytes < layout.fixed_bytes:
        assert tokens == 0
    elif tokens == EVERY_LENGTH:
        assert layout.bytes_per_token == 0
        assert layout.transfer_bytes(tokens) <= n_bytes
    else:
        assert layout.transfer_bytes(tokens) <= n_bytes < layout.transfer_bytes(tokens + 1)


@given(layouts, st.integers(0, 500_000))
def test_inverse_of_a_transfer(layout: KVLayout, tokens: int) -> None:
    found = layout.tokens_for_bytes(layout.transfer_bytes(tokens))
    assert found >= tokens
    assert layout.transfer_bytes(found) == layout.transfer_bytes(tokens)


def test_inverse_by_hand() -> None:
    layout = KVLayout(
        fixed_bytes=100,
        bytes_per_token=10,
        windows=(WindowGroup(bytes_per_token=5, window_tokens=4),),
        n_layers=2,
    )
    # 4 tokens cost 100 + 4 x 15 = 160; each further one 10.
    answers = {0: 0, 99: 0, 100: 0, 114: 0, 115: 1, 159: 3, 160: 4, 169: 4, 170: 5, 1160: 104}
    assert {n: layout.tokens_for_bytes(n) for n in answers} == answers


def test_inverse_of_a_layout_that_stops_growing() -> None:
    layout = KVLayout(
        fixed_bytes=0,
        bytes_per_token=0,
        windows=(WindowGroup(bytes_per_token=7, window_tokens=10),),
        n_layers=1,
    )
    assert layout.tokens_for_bytes(69) == 9
    assert layout.tokens_for_bytes(70) == EVERY_LENGTH


def test_a24_windowed_layers_are_capped_on_the_wire_and_whole_in_memory() -> None:
    """9 full and 39 windowed layers (window 128): 23,040 and 199,680 B per token."""
    kv = load_model("mimo-v2-flash").kv
    full, windowed = 23_040, 199_680
    assert [kv.transfer_bytes(n) for n in (1, 128, 129, 8_192)] == [
        full + windowed,
        128 * (full + windowed),
        129 * full + 128 * windowed,
        8_192 * full + 128 * windowed,
    ]
    assert [kv.reserved_bytes(n) for n in (1, 128, 129, 8_192)] == [
        n * (full + windowed) for n in (1, 128, 129, 8_192)
    ]
    # Continuous at the window: one more token never adds more than one token of all layers.
    assert kv.transfer_bytes(129) - kv.transfer_bytes(128) == full
    assert kv.reserved_bytes(129) - kv.reserved_bytes(128) == full + windowed


def test_reserved_bytes_are_whole_pages_and_keep_the_state() -> None:
    layout = KVLayout(fixed_bytes=1000, bytes_per_token=10, n_layers=1)
    assert [layout.reserved_bytes(n, page_tokens=16) for n in (0, 1, 16, 17)] == [1000, 1160, 1160, 1320]


@given(layouts, st.integers(0, 500_000), st.integers(1, 10_000))
def test_reserved_is_never_below_transferred(layout: KVLayout, tokens: int, page_tokens: int) -> None:
    assert layout.reserved_bytes(tokens, page_tokens) >= layout.transfer_bytes(tokens)
