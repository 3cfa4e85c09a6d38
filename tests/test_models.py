"""Models: the layers against JAX's own, the papers' parameter counts, and the contract every model keeps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from atoll.errors import AtollError
from atoll.problems.convolution import conv, conv_pool, max_pool
from atoll.problems.models import MODELS, Cnn, Logistic, Mlp, Vgg11

# One of each kind, with the smallest sample it can take.
EACH = [
    pytest.param(Logistic(), (3, 2), id="logistic"),
    pytest.param(Mlp(), (4, 4, 1), id="mlp"),
    pytest.param(Cnn(), (16, 17, 2), id="cnn"),
    pytest.param(Vgg11(), (32, 32, 1), id="vgg11"),
]
LIGHT = EACH[:3]


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# Compiled once and shared: a convolution run operation by operation compiles every one of its slices.
@functools.cache
def applied(model):
    return jax.jit(model.apply)


@functools.cache
def initial(model, shape):
    with jax.enable_x64(False):  # whichever test asks first
        return jax.jit(lambda key: model.init(key, shape, 3))(jax.random.key(0))


def cross_entropy(model, params, x, y, key=None):
    logits = model.apply(params, x, key)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def normal(shape):
    # NumPy's, because JAX compiles its generator anew for each shape.
    return np.random.default_rng(1).normal(size=shape)


def batch(shape, size=2):
    return normal((size, *shape)).astype(np.float32), np.arange(size) % 3


def reference_conv(x, w, b, padding):
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")) + b


def reference_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def assert_same_value_and_gradients(ours, reference, arguments):
    def value_and_gradients(function):
        value = function(*arguments)
        weights = jnp.cos(jnp.arange(value.size)).reshape(value.shape)
        return value, jax.grad(lambda args: (weights * function(*args)).sum())(arguments)

    # One compilation, and nothing is run operation by operation.
    (value, gradients), (expected, wanted) = jax.jit(
        lambda: (value_and_gradients(ours), value_and_gradients(reference))
    )()
    assert value.shape == expected.shape
    assert value.dtype == jnp.float64
    np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-12)
    for gradient, exact in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(
    ("image", "kernel"),
    [
        ((2, 9, 7, 1), (5, 5, 1, 3)),
        ((3, 6, 6, 4), (3, 3, 4, 2)),
        ((1, 5, 4, 2), (2, 3, 2, 5)),
        ((2, 3, 3, 2), (1, 1, 2, 3)),
        ((9, 12, 12, 8), (5, 5, 8, 3)),
        ((20, 5, 6, 9), (3, 3, 9, 2)),
    ],
)
def test_conv_is_the_convolution_with_and_without_pool(image, kernel, padding):
    with jax.enable_x64(True):
        arguments = [jnp.asarray(normal(s)) for s in (image, kernel, kernel[-1:])]
        assert_same_value_and_gradients(
            lambda x, w, b: conv(x, w, b, padding), lambda x, w, b: reference_conv(x, w, b, padding), arguments
        )
        assert_same_value_and_gradients(
            lambda x, w, b: conv_pool(x, w, b, padding),
            lambda x, w, b: jax.nn.relu(reference_pool(reference_conv(x, w, b, padding))),
            arguments,
        )


def test_large_convolutions_of_a_cpu_are_made_in_tiles_and_small_ones_are_not():
    def multiplications(batch, channels, size=12):
        x, w, b = jnp.ones((batch, size, size, channels)), jnp.ones((5, 5, channels, 64)), jnp.ones(64)
        cost = jax.jit(conv_pool).lower(x, w, b).compile().cost_analysis()
        return cost["flops"] / (2 * (size - 4) ** 2 * 25 * batch * channels * 64)

    assert multiplications(10, 64) < 0.6
    assert multiplications(10, 1) > 0.9
    assert multiplications(1, 64) > 0.9
    assert multiplications(99, 64, size=6) > 0.9  # a single pooled output saves nothing


def test_the_blocks_have_second_derivatives_which_exact_meta_learning_takes():
    with jax.enable_x64(True):
        x, w, direction = (jnp.asarray(normal(s)) for s in ((9, 12, 12, 8), (5, 5, 8, 3), (5, 5, 8, 3)))

        def products(block):
            def loss(w):
                return jnp.sum(jnp.sin(block(x, w, jnp.ones(3))))

            return jax.jvp(jax.grad(loss), (w,), (direction,))[1]

        ours, expected = jax.jit(
            lambda: (
                products(conv_pool),
                products(lambda x, w, b: jax.nn.relu(reference_pool(reference_conv(x, w, b, "VALID")))),
            )
        )()
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [3, 5])
def test_tiles_round_little(size):
    x, w = jnp.float32(normal((12, 11, 11, 64))), jnp.float32(normal((size, size, 64, 8)))

    def both(convolve):
        value, pull = jax.vjp(convolve, x, w)
        return value, *pull(jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape))

    for ours, expected in zip(both(conv), both(lambda x, w: reference_conv(x, w, 0, "VALID")), strict=True):
        assert abs(ours - expected).max() < 1e-5 * abs(expected).max()


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_numbers_that_tiles_would_spoil_are_multiplied_as_they_are(kind):
    x, w = jnp.asarray(5 * normal((40, 8, 8, 8)), kind), jnp.asarray(5 * normal((3, 3, 8, 2)), kind)
    expected = reference_conv(*(jnp.asarray(part, jnp.float32) for part in (x, w)), 0, "VALID")
    assert abs(conv(x, w) - expected).max() <= (0 if kind == jnp.int32 else 0.01) * abs(expected).max()


def test_clients_have_filters_of_their_own_side_by_side_or_one_after_another():
    x, w, b = (jnp.float32(normal(shape)) for shape in ((3, 9, 12, 12, 8), (3, 5, 5, 8, 4), (3, 4)))
    alone = jnp.stack([conv_pool(*arrays) for arrays in zip(x, w, b, strict=True)])
    np.testing.assert_allclose(jax.vmap(conv_pool)(x, w, b), alone, atol=1e-4)
    np.testing.assert_allclose(lax.map(lambda arrays: conv_pool(*arrays), (x, w, b)), alone, atol=1e-4)


def test_an_image_that_is_not_finite_spoils_no_other():
    x, w, b = (jnp.float32(normal(shape)) for shape in ((9, 12, 12, 8), (5, 5, 8, 4), (4,)))
    spoilt = conv_pool(x.at[4, 3, 3].set(jnp.nan), w, b)
    others = np.arange(9) != 4
    np.testing.assert_array_equal(spoilt[others], conv_pool(x, w, b)[others])
    assert jnp.isnan(spoilt[4]).any()


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_a_gpus_way_is_the_convolution_too(padding, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.enable_x64(True):
        assert_same_value_and_gradients(
            lambda x, w, b: conv_pool(x, w, b, padding),
            lambda x, w, b: jax.nn.relu(reference_pool(reference_conv(x, w, b, padding))),
            [jnp.asarray(normal(s)) for s in ((9, 12, 11, 8), (5, 5, 8, 3), (3,))],
        )


@pytest.mark.parametrize("shape", [(13, 12, 10, 8), (1, 6, 6, 1)])
def test_where_more_than_one_of_a_pool_is_largest_the_first_learns(shape):
    w = jnp.zeros((3, 3, shape[-1], 2))
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    gradient = jax.jit(jax.grad(lambda w: conv_pool(x, w, jnp.ones(2), "VALID").sum()))(w)
    first = x[:, :-2:2, :-2:2]
    np.testing.assert_allclose(gradient[0, 0, :, 0], first.sum((0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 4, 4, 3), (1, 6, 2, 1), (2, 5, 7, 2), (3, 2, 3, 4)])
def test_max_pool_is_the_pool_and_drops_the_odd_edge(shape):
    with jax.enable_x64(True):
        assert_same_value_and_gradients(max_pool, reference_pool, [jnp.asarray(normal(shape))])


def test_max_pool_gives_a_tie_to_the_first():
    gradient = jax.grad(lambda x: max_pool(x).sum())(jnp.ones((1, 2, 2, 1)))
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 0], [0, 0]])


def test_papers_parameter_counts():
    key = jax.random.key(0)
    assert count(jax.eval_shape(lambda: Cnn().init(key, (28, 28, 1), 10))) == 582_026
    assert count(jax.eval_shape(lambda: Vgg11().init(key, (32, 32, 3), 100))) == 9_797_092
    assert (
        count(jax.eval_shape(lambda: Mlp().init(key, (28, 28, 1), 10))) == 784 * 80 + 80 + 80 * 60 + 60 + 60 * 10 + 10
    )
    assert count(jax.eval_shape(lambda: Logistic().init(key, (28, 28, 1), 10))) == 7_850


@pytest.mark.parametrize(("model", "shape"), EACH)
def test_head_is_the_last_layer_and_logits_have_a_column_for_each_class(model, shape):
    params, apply = initial(model, shape), applied(model)
    assert set(params) == {"body", "head"}
    assert set(params["head"]) == {"w", "b"}
    assert params["head"]["w"].shape[1:] == params["head"]["b"].shape == (3,)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    x, _ = batch(shape)
    logits = apply(params, x)
    assert logits.shape == (2, 3)
    # Nothing comes after the head: it is affine in the head's parameters, and zero without them.
    np.testing.assert_array_equal(apply({**params, "head": jax.tree.map(np.zeros_like, params["head"])}, x), 0)
    doubled = apply({**params, "head": jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params["head"])}, x)
    np.testing.assert_allclose(doubled, 2 * np.asarray(logits), rtol=1e-5)


def test_logistic_has_no_body():
    assert jax.tree.leaves(Logistic().init(jax.random.key(0), (5,), 3)["body"]) == []


@pytest.mark.parametrize(("model", "shape"), LIGHT)
def test_init_is_uniform_within_one_over_root_fan_in(model, shape):
    params = initial(model, shape)
    layers = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, dict) and "w" in node)
    for layer in layers:
        bound = 1 / math.sqrt(math.prod(layer["w"].shape[:-1]))
        assert max(abs(layer["w"]).max(), abs(layer["b"]).max()) <= bound
        if layer["w"].size > 500:
            assert layer["w"].std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize(("model", "shape"), EACH)
def test_all_is_double_precision_where_the_default_is(model, shape):
    with jax.enable_x64(True):
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), shape, 3))
        x = jax.ShapeDtypeStruct((2, *shape), jnp.float64)
        logits = jax.eval_shape(lambda p, x: model.apply(p, x, jax.random.key(0)), params, x)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves((params, logits)))


def test_init_depends_on_the_key_alone():
    def leaves(seed):
        return jax.tree.leaves(Mlp((3,)).init(jax.random.key(seed), (3,), 3))

    assert all(np.array_equal(a, b) for a, b in zip(leaves(0), leaves(0), strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(leaves(0), leaves(1), strict=True))


@pytest.mark.parametrize(("model", "shape"), EACH)
def test_dropout_needs_a_key(model, shape):
    params, apply = initial(model, shape), applied(model)
    x, _ = batch(shape)
    plain = apply(params, x)
    np.testing.assert_array_equal(plain, apply(params, x))
    one, two = (apply(params, x, jax.random.key(seed)) for seed in (1, 2))
    assert model.stochastic == (not np.array_equal(one, plain)) == (not np.array_equal(one, two))


def test_without_dropout_a_key_changes_nothing():
    model, shape = Cnn(dropout=0), (16, 17, 2)
    assert not model.stochastic
    assert not Vgg11(dropout=0).stochastic
    x, _ = batch(shape)
    params = initial(Cnn(), shape)
    plain, keyed = jax.jit(lambda: (model.apply(params, x), model.apply(params, x, jax.random.key(1))))()
    np.testing.assert_array_equal(plain, keyed)


def test_dropout_keeps_the_mean():
    # All inputs to the fc layer stay positive, so the network is linear after the dropout and means pass through.
    model = Cnn()
    params = jax.tree.map(jnp.abs, initial(model, (16, 17, 2)))
    x = jnp.ones((1000, 16, 17, 2))
    draws = applied(model)(params, x, jax.random.key(1))
    np.testing.assert_allclose(draws.mean(axis=0), applied(model)(params, x)[0], rtol=0.01)
    assert draws.std(axis=0).min() > 0


@pytest.mark.parametrize(("model", "shape"), EACH)
def test_curvature_by_jvp_of_grad(model, shape):
    """The meta-gradient's Hessian-vector product; where it is cheap, against a central difference in float64."""
    x, y = batch(shape)
    if model == Vgg11():
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), shape, 3))
        out = jax.eval_shape(lambda p: jax.jvp(jax.grad(lambda q: cross_entropy(model, q, x, y)), (p,), (p,)), params)
        assert jax.tree.structure(out[1]) == jax.tree.structure(params)
        return
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), initial(model, shape))
        x = jnp.asarray(x, jnp.float64)
        gradient = jax.grad(lambda p: cross_entropy(model, p, x, y, jax.random.key(2)))

        @jax.jit
        def gradient_ahead(params, along, distance):
            return gradient(jax.tree.map(lambda a, d: a + distance * d, params, along))

        along = gradient_ahead(params, params, 0.0)
        _, curvature = jax.jit(lambda p, v: jax.jvp(gradient, (p,), (v,)))(params, along)
        # Small enough to cross no kink of ReLU, ELU or the pool.
        delta = 1e-6
        ahead, behind = (gradient_ahead(params, along, distance) for distance in (delta, -delta))
        for exact, a, b in zip(*map(jax.tree.leaves, (curvature, ahead, behind)), strict=True):
            np.testing.assert_allclose(exact, (np.asarray(a) - np.asarray(b)) / (2 * delta), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("elu", [math.exp(-1) - 1, 0, 2]),
        ("relu", [0, 0, 2]),
        ("leaky-relu", [-0.01, 0, 2]),
        ("tanh", [math.tanh(-1), 0, math.tanh(2)]),
        ("gelu", [-(1 - math.erf(0.5**0.5)) / 2, 0, 1 + math.erf(2**0.5)]),
    ],
)
def test_mlp_activations(name, expected):
    identity = {"w": jnp.eye(3), "b": jnp.zeros(3)}
    logits = Mlp((3,), name).apply({"body": (identity,), "head": identity}, jnp.array([[-1.0, 0.0, 2.0]]))
    np.testing.assert_allclose(logits[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("model", "shape"), LIGHT)
def test_memorises_a_random_batch(model, shape):
    x, y = batch(shape, size=6)

    def step(params, key):
        gradient = jax.grad(lambda p: cross_entropy(model, p, x, y, key))(params)
        return jax.tree.map(lambda a, g: a - 0.1 * g, params, gradient), None

    params, _ = lax.scan(step, initial(model, shape), jax.random.split(jax.random.key(2), 300))
    np.testing.assert_array_equal(applied(model)(params, x).argmax(axis=1), y)


def test_vgg11_passes_signal_through_its_depth():
    """With the uniform init of the others two images' logits differ by 0.3% or less, and nothing trains."""
    model, shape = Vgg11(), (32, 32, 1)
    x, _ = batch(shape)
    logits = applied(model)(initial(model, shape), x)
    assert abs(logits[0] - logits[1]).max() > 0.03 * abs(logits).max()


def test_a_cohort_is_mapped_like_its_clients():
    model, shape = Cnn(), (16, 17, 2)
    scales = np.array([0.5, 1.0, 2.0], np.float32)
    cohort = jax.tree.map(lambda leaf: np.multiply.outer(scales, leaf), initial(model, shape))
    x = normal((3, 2, *shape)).astype(np.float32)
    together = jax.jit(jax.vmap(model.apply))(cohort, x)
    for client in range(3):
        alone = applied(model)(jax.tree.map(lambda leaf, i=client: leaf[i], cohort), x[client])
        np.testing.assert_allclose(together[client], alone, rtol=1e-4, atol=1e-5)


def test_registry_builds_the_defaults():
    assert {name: build() for name, build in MODELS.items()} == {
        "logistic": Logistic(),
        "mlp": Mlp((80, 60), "elu"),
        "cnn": Cnn(0.2),
        "vgg11": Vgg11(0.5),
    }


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: Mlp(activation="rellu"), "unknown activation 'rellu'; did you mean 'relu'"),
        (lambda: Mlp(widths=(8, 0)), r"widths are \(8, 0\)"),
        (lambda: Cnn(dropout=1.0), "dropout is 1.0"),
        (lambda: Vgg11(dropout=-0.1), "dropout is -0.1"),
        (lambda: Cnn().init(jax.random.key(0), (784,), 10), r"needs images .* shape \(784,\)"),
        (lambda: Cnn().init(jax.random.key(0), (28, 15, 1), 10), "at least 16x16"),
        (lambda: Vgg11().init(jax.random.key(0), (28, 28, 1), 10), "at least 32x32"),
        (lambda: conv(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)), jnp.ones(1), "same"), "unknown padding 'same'"),
        (lambda: conv_pool(jnp.ones((9, 9, 9, 8)), jnp.ones((3, 3, 8, 1)), jnp.ones(1), "same"), "unknown padding"),
        (lambda: conv(jnp.ones((1, 3, 3, 2)), jnp.ones((3, 3, 1, 1))), "have other channels than filters"),
        (lambda: conv_pool(jnp.ones((1, 5, 3, 1)), jnp.ones((3, 5, 1, 3)), jnp.ones(3)), "are larger than images"),
    ],
)
def test_errors_name_the_value_and_the_remedy(broken, message):
    with pytest.raises(AtollError, match=message):
        broken()
