import numpy as np
import pytest

from ckn_scale.core.rotation import Rotation
from ckn_scale.core.vector_codes import SignCodec, make_codec


def unit_rows(count, dim, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("dim", "padded"), [(3, 8), (24, 32), (256, 256), (1000, 1024), (3072, 3072)])
def test_rotation_is_orthogonal_and_undone(dim, padded):
    rotation, rows = Rotation(dim), unit_rows(20, dim)
    turned = rotation.apply(rows)
    assert turned.shape == (20, padded)
    np.testing.assert_allclose(turned @ turned.T, rows @ rows.T, atol=1e-5)
    np.testing.assert_allclose(rotation.undo(turned), rows, atol=1e-6)


def test_rotation_spreads_a_vector_evenly():
    spike = np.zeros((1, 4096), np.float32)
    spike[0, 17] = 1
    np.testing.assert_allclose(np.abs(Rotation(4096).apply(spike)), 1 / 64, rtol=1e-5)


@pytest.mark.parametrize("name", ["signs", "float16"])
def test_a_code_depends_on_its_row_alone(name):
    codec, rows = make_codec(name, 300), unit_rows(50, 300)
    codes = codec.encode(rows)
    assert (codes.shape, codes.dtype) == ((50, codec.code_bytes), np.uint8)
    assert np.array_equal(codec.encode(rows[37:38]), codes[37:38])
    assert np.array_equal(codec.encode(rows[::-1]), codes[::-1])
    assert codec.encode(rows[:0]).shape == (0, codec.code_bytes)
    assert codec.decode(codes).shape == (50, 300)


def test_signs_of_a_vlad_take_four_kilobytes():
    assert SignCodec(32_768).code_bytes == 4104


def test_signs_estimate_inner_products_without_bias():
    """⟨decoded, x⟩ = 1 for the vector itself; for others right on average, and off as one bit allows."""
    rows, codec = unit_rows(400, 2048), SignCodec(2048)
    queries = unit_rows(400, 2048, seed=1) + 0.5 * rows
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    decoded = codec.decode(codec.encode(rows))
    np.testing.assert_allclose(np.sum(decoded * rows, axis=1), 1, atol=1e-4)
    errors = np.sum(decoded * queries, axis=1) - np.sum(rows * queries, axis=1)
    spread = 0.76 / np.sqrt(2048)  # √(π/2 − 1) of the part of a query that is not along the row
    assert abs(errors.mean()) < 4 * spread / np.sqrt(400)
    assert errors.std() < 1.2 * spread


def test_zero_rows_decode_to_zero():
    for name in ("signs", "float16"):
        codec = make_codec(name, 256)
        assert not codec.decode(codec.encode(np.zeros((2, 256), np.float32))).any()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no encoding of vectors named 'bits'"):
        make_codec("bits", 8)
    with pytest.raises(ValueError, match=r"expected \(N, 256\), got \(1, 7\)"):
        SignCodec(256).encode(np.zeros((1, 7), np.float32))
