"""Codebooks whose sums are points of the lattice E8: where a fit of additive codebooks starts.

E8 has the densest packing of eight dimensions and nearly the best cells. It falls into 256 classes over 2 E8: a
shortest vector of each, and 256 points of 2 E8, are two codebooks whose sums fill a ball-like region as evenly as E8
does. More codebooks repeat the step one octave finer.

The points of 2 E8 are the origin and its 240 shortest vectors. The last 15 entries are no points of it but deep holes
of E8 around the origin, where a Gaussian has four times the mass of another cell: better than 15 points of the next
shell (0.0917 against 0.0920), although 2 % of the sums then are one point twice.

Relative error of Gaussian vectors outside a sample of 262,144, 8 to 10 rounds of least squares, beam 16: from k-means
0.0931, from here 0.0917; of 1,048,576 0.0914. Least squares leave the lattice but not its neighbourhood; from k-means
they do not find it. That neighbourhood is good for Gaussian values only: Laplacian ones lose 0.0984 from here and
0.0929 from k-means, and where half of the values are zero it is a quarter more. ``additive_fit`` looks first.

Source: J. Conway and N. Sloane, "Sphere Packings, Lattices and Groups", chapters 4 and 8: E8, its classes, its holes.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from trapetum.tensors.additive import ENTRIES, GROUP

__all__ = ["lattice_codebooks"]

_SPREAD = 1.15  # of the lattice in units of what is coded: 1.1 to 1.2 are alike after a few rounds


def lattice_codebooks(count: int, scale: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Codebooks for vectors of independent values, spread like Gaussian ones.

    Parameters
    ----------
    count : int
        2 or more.
    scale : float
        Root mean square of a value.
    rng : Generator
        Chooses between vectors of a class that are equally short.

    Returns
    -------
    ndarray of float32, shape (count, 256, 8)

    Examples
    --------
    >>> coarse, fine = lattice_codebooks(2, 1.15, np.random.default_rng(0))
    >>> np.bincount(np.square(fine).sum(axis=1).round().astype(int)).tolist()
    [1, 0, 120, 0, 135]
    """
    roots = _roots()
    axes = np.eye(GROUP)
    holes = np.concatenate([axes, -axes])[: ENTRIES - 1 - len(roots)]
    coarse = np.concatenate([np.zeros((1, GROUP)), 2 * roots, holes])
    classes = _classes(roots, rng)
    books = [coarse, *(classes / 2.0**m for m in range(count - 1))]  # each one more halves the cells
    found: NDArray[np.float32] = (np.stack(books) * (scale / _SPREAD)).astype(np.float32)
    return found


def _roots() -> NDArray[np.float64]:
    """The 240 shortest vectors of E8, of squared length 2."""
    found = []
    for i, j in combinations(range(GROUP), 2):
        for a, b in product((1.0, -1.0), repeat=2):
            found.append([a if k == i else b if k == j else 0.0 for k in range(GROUP)])
    found += [list(v) for v in product((0.5, -0.5), repeat=GROUP) if sum(x < 0 for x in v) % 2 == 0]
    return np.array(found)


def _classes(roots: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """A shortest vector of each class of E8 over 2 E8: 1 of length 0, 120 of squared length 2, 135 of 4."""
    sums = (roots[:, None] + roots).reshape(-1, GROUP)  # every vector of squared length 4 is one of these
    vectors = np.unique(np.concatenate([roots, sums]), axis=0)
    vectors = rng.permutation(vectors)
    vectors = vectors[np.argsort(np.square(vectors).sum(axis=1), kind="stable")]
    # E8 is its own dual: two vectors are of one class where their products with every root have the same parity.
    parities = np.rint(vectors @ roots.T).astype(np.int64) % 2
    first = np.sort(np.unique(parities, axis=0, return_index=True)[1])
    return vectors[first]
