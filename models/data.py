"""Real text that every machine has: Python's own source files, as packed rows of bytes.

Every `*.py` file of the standard library is one document. A document is written as the DOC mark
followed by its bytes; the target of its last byte is the DOC mark again, so a model learns where
documents end. Documents are laid end to end in a shuffled order and the stream is cut into rows:

    row 0: [DOC a a a a a DOC b b b b]   segment_ids 0 0 0 0 0 0 1 1 1 1 1
    row 1: [b b b DOC c c c c c c pad]   segment_ids 0 0 0 1 1 1 1 1 1 1 -1

Documents keep their true lengths but where a row's edge cuts one; nothing is padded but the last
row of an epoch. `PackedRows.batch` is a function of the seed and the step alone, so a resumed run
reads what an uninterrupted one would have read.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOC = 256  # begins every document; as a target, ends it
PAD = 257  # fills the last row of an epoch; never a target
VOCAB_SIZE = 258
NO_TARGET = -1  # target of a padding token
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
)


class Document(NamedTuple):
    """One text of the corpus: its path relative to the root, and its bytes."""

    name: str
    text: bytes


class Batch(NamedTuple):
    """Rows of packed documents, each array int32 [rows, row_len]."""

    tokens: np.ndarray
    targets: np.ndarray  # the next token of the same document; NO_TARGET on padding
    segment_ids: np.ndarray  # 0, 1, ... for each document of the row; -1 on padding
    positions: np.ndarray  # counted from the document's first token in the row; 0 on padding


def encode(text: bytes) -> np.ndarray:
    """Writes one document as tokens.

    Args:
        text: The document's bytes.

    Returns:
        int32 [1 + len(text)]: the DOC mark, then one token a byte.
    """
    return np.concatenate([[DOC], np.frombuffer(text, np.uint8)]).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """Writes tokens as text, leaving out the DOC and PAD marks.

    Args:
        tokens: Integers of any shape, each below VOCAB_SIZE.

    Returns:
        The text; bytes that are no UTF-8 show as U+FFFD.
    """
    flat = np.asarray(tokens).reshape(-1)
    return bytes(flat[flat < DOC].astype(np.uint8)).decode("utf-8", errors="replace")


def read_corpus(root: str | Path | None = None) -> list[Document]:
    """Reads every Python source file under a folder, without tests and installed packages.

    Args:
        root: The folder; None is the standard library of the running Python.

    Returns:
        The documents that are not empty, sorted by name.

    Raises:
        ValueError: The folder holds no such file.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    documents = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and path.is_file():
            documents.append(Document(relative.as_posix(), path.read_bytes()))
    documents = sorted(document for document in documents if document.text)
    if not documents:
        raise ValueError(f"{root=} holds no Python source file")
    return documents


def is_held_out(name: str, share: float = 0.05) -> bool:
    """Tells whether a document is kept from training, by its name alone.

    A document stays on its side when others are added or removed.

    Args:
        name: The document's name.
        share: The part of all names that is held out, from 0 to 1.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(documents: list[Document], share: float = 0.05) -> tuple[list[Document], list[Document]]:
    """Splits documents into train and held-out.

    Args:
        documents: The corpus.
        share: The part that is held out, from 0 to 1.

    Returns:
        (train, held_out), each in the given order.
    """
    train = [document for document in documents if not is_held_out(document.name, share)]
    held_out = [document for document in documents if is_held_out(document.name, share)]
    return train, held_out


def fingerprint(documents: list[Document]) -> str:
    """Names a corpus by its content, so that a run is not resumed on another one.

    Args:
        documents: The corpus; its order counts.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.name.encode() + b"\0")
        digest.update(hashlib.sha256(document.text).digest())
    return digest.hexdigest()[:16]


class PackedRows:
    """Batches of packed rows, each a function of the seed and the step alone."""

    def __init__(self, documents: list[Document], *, row_len: int, rows: int, seed: int = 0):
        """Holds the documents as tokens.

        Args:
            documents: What to pack.
            row_len: Tokens in a row.
            rows: Rows in a batch.
            seed: Of the order of documents and rows, another order each epoch.

        Raises:
            ValueError: No documents, or sizes below 1.
        """
        if not documents:
            raise ValueError("documents must not be empty")
        if row_len < 1 or rows < 1:
            raise ValueError(f"{row_len=} and {rows=} must be at least 1")
        self.row_len, self.rows, self.seed = row_len, rows, seed
        self._documents = [encode(document.text).astype(np.uint16) for document in documents]
        self.epoch_tokens = sum(len(document) for document in self._documents)
        self.epoch_rows = -(-self.epoch_tokens // row_len)
        self._epoch: tuple[int, Batch] | None = None  # the last epoch packed

    def batch(self, step: int) -> Batch:
        """Gives the rows of one step.

        Args:
            step: Counted from 0; epochs follow one another without end.

        Returns:
            `rows` rows; a batch may span two epochs.
        """
        first = step * self.rows
        found = []
        for index in range(first, first + self.rows):
            epoch, row = divmod(index, self.epoch_rows)
            found.append([array[row] for array in self._packed(epoch)])
        return Batch(*(np.stack(arrays).astype(np.int32) for arrays in zip(*found, strict=True)))

    def _packed(self, epoch: int) -> Batch:
        """All rows of one epoch, in the order they are read."""
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            documents = [self._documents[i] for i in rng.permutation(len(self._documents))]
            # Shuffling rows too keeps the pieces of one long document from filling a batch.
            self._epoch = (epoch, _pack(documents, self.row_len, rng))
        return self._epoch[1]


def _pack(documents: list[np.ndarray], row_len: int, rng: np.random.Generator) -> Batch:
    """Lays documents end to end, cuts the stream into rows and shuffles the rows."""
    lengths = np.array([len(document) for document in documents])
    total = int(lengths.sum())
    row_count = -(-total // row_len)
    padding = row_count * row_len - total

    def to_rows(array: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(array, (0, padding), constant_values=fill).reshape(row_count, row_len)

    stream = np.concatenate(documents).astype(np.int32)
    # One shift serves all documents: after a document's last byte the stream holds the DOC mark
    # of the next, which is the very target that ends a document.
    targets = to_rows(np.append(stream[1:], np.int32(DOC)), NO_TARGET)
    index = np.arange(total, dtype=np.int32)
    document_start = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int32)
    row_start = index - index % row_len
    positions = to_rows(index - np.maximum(document_start, row_start), 0)
    document_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    segment_ids = to_rows(document_ids - document_ids[row_start], -1)
    order = rng.permutation(row_count)
    tokens = to_rows(stream, PAD)
    return Batch(tokens[order], targets[order], segment_ids[order], positions[order])
