"""Named grids of attention work, what each of them computes, and how much of it.

A case is a shape and a mask; it holds no array and knows no implementation. FLOPs are counted
on visible (query, key) pairs only, so that a skipped block earns nothing.
"""

from dataclasses import dataclass, field, replace

import numpy as np

KINDS = ("full", "causal", "window", "documents")
MODES = ("fwd", "bwd", "tables", "startup")
SERVING_KINDS = ("decode", "prefill", "subset", "mla")


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, in pallas_attn's layout [batch, len, heads, dim]."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str = "bfloat16"

    @property
    def q(self):
        return (self.batch, self.q_len, self.q_heads, self.head_dim)

    @property
    def k(self):
        return (self.batch, self.kv_len, self.kv_heads, self.head_dim)

    @property
    def v(self):
        return (self.batch, self.kv_len, self.kv_heads, self.v_dim)

    @property
    def out(self):
        return (self.batch, self.q_len, self.q_heads, self.v_dim)


@dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees, said without any library's mask objects.

    Attributes:
        kind: "full", "causal" (top-left), "window" or "documents" (causal inside each).
        left: Keys a window shows before the query's own position.
        right: Keys a window shows after it.
        lengths: Lengths of the packed documents, in tokens; they add up to the row.
    """

    kind: str
    left: int = 0
    right: int = 0
    lengths: tuple[int, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind=} must be one of {KINDS}")

    @property
    def label(self):
        match self.kind:
            case "window":
                return f"window({self.left},{self.right})"
            case "documents":
                return f"{len(self.lengths)} documents"
            case kind:
                return kind


@dataclass(frozen=True)
class Case:
    """One row of a suite."""

    suite: str
    shape: Shape
    mask: MaskSpec
    modes: tuple[str, ...] = field(default=("fwd", "bwd"))

    @property
    def name(self):
        s = self.shape
        dims = f"D{s.head_dim}" if s.v_dim == s.head_dim else f"D{s.head_dim}/{s.v_dim}"
        heads = f"h{s.q_heads}" if s.kv_heads == s.q_heads else f"h{s.q_heads}/{s.kv_heads}"
        length = f"{s.q_len // 1024}k" if s.q_len % 1024 == 0 else str(s.q_len)
        dtype = {"bfloat16": "", "float16": " fp16"}.get(s.dtype, "")
        return f"{dims} {heads} {s.batch}x{length} {self.mask.label}{dtype}"


@dataclass(frozen=True)
class ServingShape:
    """Sizes of one call that attends new tokens to a cache in pages.

    Attributes:
        kind: "decode" (one new token a sequence), "prefill" (ragged chunks, causal from each
            sequence's end), "subset" (blocks of queries with a list of pages each) or "mla" (decode
            whose values are the first v_dim channels of the keys).
        lens: Keys of each sequence or, for "subset", of each list.
        q_lens: New tokens of each sequence or queries of each block.
        page_size: Keys of a page.
        q_heads, kv_heads, head_dim, v_dim, dtype: As in Shape.
        pool: Keys that the pages of "subset" hold together; None for those of all sequences.
    """

    kind: str
    lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_dim: int = 128
    dtype: str = "bfloat16"
    pool: int | None = None

    def __post_init__(self):
        if self.kind not in SERVING_KINDS:
            raise ValueError(f"{self.kind=} must be one of {SERVING_KINDS}")

    @property
    def batch(self):
        return len(self.lens)

    @property
    def tokens(self):
        return sum(self.q_lens)

    @property
    def max_pages(self):
        return -(-max(self.lens) // self.page_size)


@dataclass(frozen=True)
class ServingCase:
    """One row of a serving suite; `title` says what its sequences are."""

    suite: str
    title: str
    shape: ServingShape
    modes: tuple[str, ...] = ("serve",)

    @property
    def name(self):
        s = self.shape
        heads = f" h{s.q_heads}" if s.kind == "mla" else ""
        return f"{s.kind}{heads} {self.title} page {s.page_size}"

    @property
    def mask(self):
        return CAUSAL if self.shape.kind == "prefill" else FULL

    @property
    def nbytes(self):
        """Bytes of the keys and values that must be read once; 0 where matmuls are the limit."""
        s = self.shape
        if s.kind not in ("decode", "mla"):
            return 0
        channels = s.head_dim + (0 if s.kind == "mla" else s.v_dim)
        return sum(s.lens) * s.kv_heads * channels * (4 if s.dtype == "float32" else 2)


def is_serving(case):
    return isinstance(case, ServingCase)


def visible_pairs(shape, mask):
    """Returns how many (query, key) pairs of one head the mask shows, over the whole batch."""
    if isinstance(shape, ServingShape):
        pairs = sum(n * kv for n, kv in zip(shape.q_lens, shape.lens, strict=True))
        hidden = sum(n * (n - 1) // 2 for n in shape.q_lens) if mask.kind == "causal" else 0
        return pairs - hidden
    rows = np.arange(shape.q_len, dtype=np.int64)
    match mask.kind:
        case "causal":
            pairs = np.minimum(rows + 1, shape.kv_len).sum()
        case "window":
            last = np.minimum(rows + mask.right, shape.kv_len - 1)
            pairs = np.maximum(last - np.maximum(rows - mask.left, 0) + 1, 0).sum()
        case "documents":
            pairs = sum(n * (n + 1) // 2 for n in mask.lengths)
        case _:
            pairs = shape.q_len * shape.kv_len
    return int(pairs) * shape.batch


def flops(case, mode):
    """Returns the floating-point operations of one call, matrix products only.

    Forward, per visible pair and query head: 2 * head_dim for q k^T and 2 * v_dim for p v, which
    is 4 * D when they are equal. Backward: scores again, dq and dk (2 * head_dim each), dv and
    dp (2 * v_dim each), which is 10 * D, 2.5 times the forward.

    Source: FlashAttention-3 (arXiv 2407.08608), section 4.1, "4 * seqlen^2 * head dimension *
    number of heads", half of it when causal, times 2.5 backward; here the half is exact, S(S+1)/2,
    and head_dim and v_dim are told apart.
    """
    s = case.shape
    per_pair = {
        "fwd": 2 * (s.head_dim + s.v_dim),
        "serve": 2 * (s.head_dim + s.v_dim),
        "bwd": 2 * (3 * s.head_dim + 2 * s.v_dim),
    }.get(mode, 0)
    return per_pair * s.q_heads * visible_pairs(s, case.mask)


def document_lengths(total=32768, longest=8192, seed=0):
    """Returns lengths like those of packed web text: log-normal, the last one cut to fit.

    Args:
        total: Tokens in the row.
        longest: Upper bound of one document, in tokens.
        seed: Of numpy's default_rng.
    """
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(int(np.clip(rng.lognormal(6.5, 1.0), 16, longest)), left))
    return tuple(lengths)


def _case(suite, length, head_dim, mask, tokens=16384, heads=None):
    """One self-attention case with `tokens` tokens and 2048 / head_dim heads unless told."""
    q_heads, kv_heads = heads or (2048 // head_dim,) * 2
    batch = max(1, tokens // length)
    return Case(suite, Shape(batch, length, length, q_heads, kv_heads, head_dim, head_dim), mask)


FULL, CAUSAL = MaskSpec("full"), MaskSpec("causal")
DOCUMENTS = MaskSpec("documents", lengths=document_lengths())


def dense():
    """The grid of the FlashAttention-3 paper at 16,384 tokens."""
    grid = [(d, m, n) for d in (64, 128, 256) for m in (FULL, CAUSAL) for n in (4096, 16384)]
    return [_case("dense", n, d, m) for d, m, n in grid]


def windows():
    """Sliding windows at 32k beside the dense causal row that they are measured against."""
    masks = (CAUSAL, MaskSpec("window", left=4096), MaskSpec("window", left=1024))
    return [_case("windows", 32768, 128, m) for m in masks]


def documents():
    """Packed documents at 32k beside the dense causal row that they are measured against."""
    return [_case("documents", 32768, 128, m) for m in (CAUSAL, DOCUMENTS)]


def gqa():
    """Grouped heads, 32 of queries on 8 of keys and values; and unequal head_dim and v_dim."""
    grid = [(m, n) for m in (FULL, CAUSAL) for n in (4096, 16384)]
    cases = [_case("gqa", n, 128, m, heads=(32, 8)) for m, n in grid]
    return [*cases, Case("gqa", Shape(4, 4096, 4096, 16, 16, 192, 128), CAUSAL)]


def odd():
    """Lengths that no tile divides, beside the even ones next to them."""
    grid = [(m, n) for m in (FULL, CAUSAL) for n in (4000, 4096, 16321, 16384)]
    return [_case("odd", n, 128, m) for m, n in grid]


def short():
    """Many short rows: 16,384 tokens in rows of 512 and 1,024."""
    grid = [(d, m, n) for d in (64, 128, 256) for m in (FULL, CAUSAL) for n in (512, 1024)]
    return [_case("short", n, d, m) for d, m, n in grid]


def long():
    """64k tokens without a mask, where errors of the sums would show."""
    grid = [(d, FULL) for d in (64, 128, 256)] + [(128, CAUSAL)]
    cases = [_case("long", 65536, d, m, heads=(512 // d,) * 2) for d, m in grid]
    return [replace(case, modes=("fwd",)) for case in cases]


def half():
    """float16, which jax's own Hopper kernel takes alone."""
    grid = [(d, m) for d in (64, 128) for m in (FULL, CAUSAL)]
    cases = [_case("half", 4096, d, m) for d, m in grid]
    return [replace(case, shape=replace(case.shape, dtype="float16")) for case in cases]


def startup():
    """First calls, in seconds; the host's share of later ones; what other documents compile."""
    shapes = ((4224, CAUSAL), (32768, DOCUMENTS))  # the first one's length is no other suite's
    return [replace(_case("startup", n, 128, m), modes=("startup",)) for n, m in shapes]


def tables():
    """Building every block table of a row of documents, against one layer's forward."""
    return [replace(_case("tables", 32768, 128, DOCUMENTS), modes=("tables",))]


def lognormal_lengths(batch=64, mean=4096, longest=16, seed=0):
    """Returns lengths of sequences in a batch: log-normal of sigma 1, at most `longest` means."""
    x = np.random.default_rng(seed).lognormal(0.0, 1.0, batch)
    lengths = np.clip((x / x.mean() * mean).astype(np.int64), 1, longest * mean)
    return tuple(int(n) for n in lengths)


def _decode(title, lens, page_size, **sizes):
    shape = ServingShape(sizes.pop("kind", "decode"), lens, (1,) * len(lens), page_size, **sizes)
    return ServingCase(shape.kind, title, shape)


def decode():
    """One new token a sequence, on 32 query and 8 KV heads; the last with lengths that vary."""
    rows = ((64, 8192, 16), (64, 8192, 64), (64, 8192, 128), (8, 32768, 64), (1, 131072, 64))
    cases = [_decode(f"{b}x{n // 1024}k", (n,) * b, page) for b, n, page in rows]
    lognormal = _decode("64 lognormal, mean 4k", lognormal_lengths(), 64)
    return [*cases, _decode("64x4k", (4096,) * 64, 64), lognormal]


def prefill():
    """Chunks of 512 to 8k tokens in one batch, from the start and after 4k tokens."""
    chunks = {
        "512 to 8k": ((512, 1024, 2048, 4096, 8192), 0),
        "2x8k": ((8192,) * 2, 0),
        "16x512 after 4k": ((512,) * 16, 4096),
    }
    return [
        ServingCase(
            "prefill", title, ServingShape("prefill", tuple(n + past for n in new), new, page_size)
        )
        for page_size in (64, 16)
        for title, (new, past) in chunks.items()
    ]


def subset():
    """4 x 4,096 queries in blocks, each with 2,048 keys in pages of its own, of a pool of 64k."""
    cases = []
    for page_size in (16, 64):
        for block in (16, 64, 256):
            count = 4 * 4096 // block
            lens, q_lens = (2048,) * count, (block,) * count
            shape = ServingShape("subset", lens, q_lens, page_size, pool=65536)
            cases.append(ServingCase("subset", f"blocks of {block}, 2k keys", shape))
    return cases


def mla():
    """Absorbed MLA: 576 channels of keys, the first 512 of them values, one KV head."""
    sizes = {"kind": "mla", "kv_heads": 1, "head_dim": 576, "v_dim": 512}
    return [_decode("32x8k", (8192,) * 32, 64, q_heads=heads, **sizes) for heads in (16, 128)]


def tiny_serving():
    """Seconds on a CPU: one call of each kind."""
    plain = ServingShape("decode", (20, 20), (1, 1), 4, 4, 2, 16, 16, "float32")
    shapes = (
        plain,
        replace(plain, lens=(1, 29)),
        replace(plain, kind="prefill", lens=(9, 20), q_lens=(9, 5)),
        replace(plain, kind="subset", lens=(8,) * 4, q_lens=(6,) * 4, pool=32),
        replace(plain, kind="mla", lens=(7, 12), kv_heads=1, v_dim=8),
    )
    return [ServingCase("tiny_serving", f"tiny {i}", shape) for i, shape in enumerate(shapes)]


def tiny():
    """Seconds on a CPU: the benchmark program's own test."""
    shape = Shape(1, 48, 48, 2, 2, 16, 16, "float32")
    grouped = Shape(2, 40, 40, 4, 2, 16, 8, "float32")
    masks = (FULL, CAUSAL, MaskSpec("window", left=9, right=2))
    cases = [Case("tiny", shape, m) for m in masks]
    packed = Case("tiny", shape, MaskSpec("documents", lengths=(20, 1, 27)))
    return [*cases, replace(packed, modes=MODES), Case("tiny", grouped, CAUSAL)]


SUITES = {
    f.__name__: f
    for f in (
        *(dense, windows, documents, gqa, odd, short, long, half, tables, startup),
        *(decode, prefill, subset, mla),
        *(tiny, tiny_serving),
    )
}
GROUPS = {
    "masks": ("windows", "documents"),
    "forward": ("dense", "short", "windows", "documents", "gqa", "odd", "long"),
    "backward": ("dense", "windows", "documents", "gqa"),
    "serving": ("decode", "prefill", "subset", "mla"),
}


def expand(names):
    """Returns suite names with those of GROUPS written out.

    Raises:
        ValueError: For a name that is neither.
    """
    expanded = []
    for name in names:
        if name not in SUITES and name not in GROUPS:
            raise ValueError(f"suite {name!r} must be one of {', '.join([*SUITES, *GROUPS])}")
        expanded += GROUPS.get(name, (name,))
    return expanded


def select(names, contains=""):
    """Returns the cases of the named suites, each piece of work once.

    Args:
        names: Names of SUITES or GROUPS, in the order to run them.
        contains: Keeps only cases whose name holds one of these texts, "|" between them.

    Raises:
        ValueError: For a name that is neither.
    """
    chosen, seen, texts = [], set(), contains.split("|")
    for name in expand(names):
        for case in SUITES[name]():
            key = (case.shape, case.mask, case.modes)
            if any(text in case.name for text in texts) and key not in seen:
                seen.add(key)
                chosen.append(case)
    return chosen
