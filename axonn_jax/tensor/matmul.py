"""Matmuls in the layout that a device computes fastest: an operand copied into its other orientation, or the product.

One and the same product runs at rates that differ by a factor of two and more with the orientation in which its
operands lie in memory (AxoNN, SC 24, section on tuning BLAS kernels: NN, NT and TN). Which one is fastest is measured
elsewhere; here a table of choices, passed explicitly, is put into the program. Rounding depends on the choice.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
from jax import lax

from axonn_jax import compat
from axonn_jax.tensor.collectives import mark_varying

Stored = Literal["NN", "NT", "TN"]
"""Orientations in memory of the operands of `C[m, n] = A[m, k] B[k, n]`: as written (N) or transposed (T)."""


@dataclass(frozen=True)
class Product:
    """A matmul on one device, `C[m, n] = A[m, k] B[k, n]`."""

    m: int
    k: int
    n: int
    stored: Stored
    dtype: str

    def __str__(self) -> str:
        return f"{self.stored} {self.m} x {self.k} x {self.n} {self.dtype}"

    @property
    def flops(self) -> int:
        """Additions and multiplications."""
        return 2 * self.m * self.k * self.n

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of both operands in memory."""
        a, b = (self.m, self.k), (self.k, self.n)
        return a[::-1] if self.stored[0] == "T" else a, b[::-1] if self.stored[1] == "T" else b


@dataclass(frozen=True)
class Form:
    """Way to compute a product: the arrays that are transposed."""

    left: bool = False
    """True if A is first copied into its other orientation."""
    right: bool = False
    """True if B is first copied into its other orientation."""
    product: bool = False
    """True if the transposed product, `B^T A^T`, is computed and transposed back."""

    def __str__(self) -> str:
        turned = [name for name in ("left", "right", "product") if getattr(self, name)]
        return f"{' and '.join(turned)} turned" if turned else "as written"


AS_WRITTEN = Form()
_TRANSPOSED = Form(product=True)
FORMS = tuple(Form(*flags) for flags in itertools.product((False, True), repeat=3))
"""Forms of a product, as written first."""


@dataclass(frozen=True)
class MatmulLayouts:
    """The form of every product for which one other than as written has been chosen."""

    chosen: tuple[tuple[Product, Form], ...] = ()
    few: int = 0
    """Tokens up to which products without a chosen form are computed transposed; 0 for never."""

    @classmethod
    def of_forms(cls, forms: Mapping[Product, Form]) -> "MatmulLayouts":
        """The table of these forms."""
        return cls(tuple((product, form) for product, form in forms.items() if form != AS_WRITTEN))

    def of(self, product: Product) -> Form:
        """The form to compute a product in."""
        few = product.m <= self.few and product.stored != "TN"
        return dict(self.chosen).get(product, _TRANSPOSED if few else AS_WRITTEN)


PLAIN = MatmulLayouts()
"""Layouts with every product as written."""


class _Forms(NamedTuple):
    """The forms of a matmul's three products, and whether its weight is held transposed."""

    turned: bool
    y: Form
    dx: Form
    dw: Form


def products(rows: int, k: int, n: int, dtype: str, *, turned: bool = False) -> tuple[Product, Product, Product]:
    """The products `Y = X W`, `dX = dY W^T` and `dW = X^T dY` of X [rows, k] and W [k, n], which may be held [n, k]."""
    if turned:
        y, dx, dw = (rows, k, n, "NT"), (rows, n, k, "NN"), (n, rows, k, "TN")
    else:
        y, dx, dw = (rows, k, n, "NN"), (rows, n, k, "NT"), (k, rows, n, "TN")
    return Product(*y, dtype), Product(*dx, dtype), Product(*dw, dtype)  # type: ignore[arg-type]


def matmul(x: jax.Array, w: jax.Array, layouts: MatmulLayouts = PLAIN, *, turned: bool = False) -> jax.Array:
    """`Y = X W` on one device, [rows, k] and [k, n] (held as [n, k] if `turned`) -> [rows, n]; no collectives.

    Products without a chosen form are `lax.dot_general` and its gradients. With a choice among the three there is no
    forward-mode derivative.
    """
    n = w.shape[0] if turned else w.shape[1]
    y, dx, dw = map(layouts.of, products(x.shape[0], x.shape[1], n, x.dtype.name, turned=turned))
    if y == dx == dw == AS_WRITTEN:
        return multiply(x, w, "NT" if turned else "NN")
    # `dot_general` does so by itself; here both gradients must vary as their operands do.
    x, w = mark_varying(x, compat.varying_axes(w)), mark_varying(w, compat.varying_axes(x))
    return _chosen(x, w, _Forms(turned, y, dx, dw))


def multiply(a: jax.Array, b: jax.Array, stored: Stored, form: Form = AS_WRITTEN) -> jax.Array:
    """`C = A B` with operands stored so, in a form; C is [m, n] whatever the form."""
    turned_a, turned_b = stored[0] == "T", stored[1] == "T"
    if form.left:
        a, turned_a = _copied(a.T), not turned_a
    if form.right:
        b, turned_b = _copied(b.T), not turned_b
    over_a, over_b = (0 if turned_a else 1), (1 if turned_b else 0)
    if form.product:
        return _copied(lax.dot_general(b, a, (((over_b,), (over_a,)), ((), ())))).T
    return lax.dot_general(a, b, (((over_a,), (over_b,)), ((), ())))


def _copied(a: jax.Array) -> jax.Array:
    """Put a barrier behind an array: XLA would move a transposition from one side of a matmul to the other."""
    return lax.optimization_barrier(a)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chosen(x: jax.Array, w: jax.Array, forms: _Forms) -> jax.Array:
    return multiply(x, w, "NT" if forms.turned else "NN", forms.y)


def _backward(forms: _Forms, kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx = multiply(dy, w, "NN" if forms.turned else "NT", forms.dx)
    dw = multiply(dy, x, "TN", forms.dw) if forms.turned else multiply(x, dy, "TN", forms.dw)
    return dx, dw


_chosen.defvjp(lambda x, w, forms: (_chosen(x, w, forms), (x, w)), _backward)
