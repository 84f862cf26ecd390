# SPDX-License-Identifier: Apache-2.0
"""The committed list of grid.py's cells: a middle cell, and cells that differ from it in one or a few axes.

T 256-4096, M 256-1024, H 1024-4096, E 8-64, K 1 2 4 8; balanced, 5x and 10x skewed; drop and no-drop; 2 and 4 ranks;
loopback and links of 4, 1, 0.4 and 0.2 Gbit/s; f32 and bf16. Every value appears in the list. Most cells are small,
because the benchmark checks that Sluice is nowhere slower, and overhead is largest in small cells.
"""

from integration_tests.benchmarks.layer.cells import Cell

#      link       W   T     M     H     E   K  skew  drop   dtype
_ROWS = """
       1gbit      2   1024  512   2048  8   1  1     no     float32
       1gbit      2   1024  512   2048  8   1  1     yes    float32
       1gbit      2   1024  512   2048  8   1  5     no     float32
       1gbit      2   1024  512   2048  8   1  5     yes    float32
       1gbit      2   1024  512   1024  8   1  10    no     float32
       1gbit      2   256   256   1024  8   1  1     no     float32
       1gbit      2   256   256   1024  8   2  1     no     float32
       1gbit      2   256   256   1024  64  8  1     no     float32
       1gbit      2   512   1024  1024  16  1  1     yes    float32
       1gbit      2   512   512   4096  16  2  1     yes    float32
       1gbit      2   2048  256   1024  32  2  1     no     float32
       1gbit      2   2048  256   1024  32  4  5     yes    float32
       1gbit      2   4096  256   1024  64  1  1     no     float32
       1gbit      2   1024  512   2048  8   1  1     no     bfloat16
       1gbit      2   256   256   1024  8   1  1     yes    bfloat16
       1gbit      4   512   256   1024  8   1  1     no     float32
       1gbit      4   512   256   1024  16  2  5     no     float32
       1gbit      4   256   512   2048  64  4  1     yes    float32
       none       2   1024  512   2048  8   1  1     no     float32
       none       2   1024  512   2048  8   1  1     yes    float32
       none       2   1024  512   2048  8   2  5     yes    float32
       none       2   256   256   1024  8   1  1     no     float32
       none       2   256   256   1024  8   1  1     yes    float32
       none       2   256   256   1024  16  4  1     no     float32
       none       2   256   1024  1024  8   1  1     no     float32
       none       2   512   256   1024  64  2  1     yes    float32
       none       2   512   256   1024  64  8  1     no     float32
       none       2   2048  256   1024  8   1  10    no     float32
       none       2   1024  1024  4096  8   1  1     no     float32
       none       2   256   256   1024  8   1  1     no     bfloat16
       none       2   1024  512   2048  8   2  1     yes    bfloat16
       none       4   256   256   1024  8   1  1     no     float32
       none       4   512   512   1024  16  2  1     yes    float32
       4gbit      2   1024  512   2048  8   1  1     no     float32
       4gbit      2   1024  512   2048  8   1  1     yes    float32
       4gbit      2   256   256   1024  8   1  1     no     float32
       4gbit      2   4096  256   1024  16  1  1     yes    float32
       4gbit      2   512   1024  2048  8   2  5     no     float32
       4gbit      2   1024  512   1024  32  4  1     no     float32
       4gbit      2   512   512   2048  8   1  1     no     bfloat16
       4gbit      4   256   256   1024  32  2  10    yes    float32
       0.4gbit    2   1024  512   2048  8   1  1     no     float32
       0.4gbit    2   1024  512   2048  8   1  1     yes    float32
       0.4gbit    2   256   256   1024  8   1  1     no     float32
       0.4gbit    2   2048  256   1024  16  2  1     yes    float32
       0.4gbit    2   512   1024  4096  8   1  5     no     float32
       0.4gbit    2   512   256   1024  64  8  1     yes    float32
       0.4gbit    2   512   512   2048  8   2  1     no     bfloat16
       0.4gbit    4   256   256   1024  8   1  1     no     float32
       0.2gbit    2   1024  512   2048  8   1  1     no     float32
       0.2gbit    2   1024  512   2048  8   1  1     yes    float32
       0.2gbit    2   256   256   1024  8   1  1     no     float32
       0.2gbit    2   1024  256   1024  8   1  10    yes    float32
       0.2gbit    2   512   256   1024  32  4  1     no     float32
       0.2gbit    2   512   512   1024  16  1  5     no     float32
       0.2gbit    2   256   256   1024  8   1  1     yes    bfloat16
       0.2gbit    4   256   256   1024  16  1  1     yes    float32
"""


def _cell(row: str) -> Cell:
    link, W, T, M, H, E, K, skew, drop, dtype = row.split()
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    routing = f"{'drop' if drop == 'yes' else 'nodrop'}{'' if skew == '1' else f'-skew{skew}'}"
    name = f"{link}-w{W}-t{T}-m{M}-h{H}-e{E}-k{K}-{routing}-{short}"
    sizes = {name: int(value) for name, value in zip("WTMHEK", (W, T, M, H, E, K), strict=True)}
    return Cell(name, link, skew=float(skew), drop=drop == "yes", dtype=dtype, **sizes)


CELLS = [_cell(row) for row in _ROWS.strip().splitlines()]
