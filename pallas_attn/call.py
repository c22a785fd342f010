"""`Call`: all that is static about one attention call, passed to every backend."""

import dataclasses

from pallas_attn.spec import Spec
from pallas_attn.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Call:
    """Hashable; equal calls share compiled code.

    Attributes:
        spec: what is computed.
        tiles: how.
        backend: by which backend.
        interpret: whether kernels run by interpretation.
        deterministic: whether two runs must be bit-equal.
    """

    spec: Spec
    tiles: Tiles
    backend: str
    interpret: bool = False
    deterministic: bool = False
