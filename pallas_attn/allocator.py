"""Which pages of a pool are free, who uses the others, and which prefixes they hold; on the host.

A page has a reference count. Sequences that begin alike share their first full pages: `match`
finds the pages of a known prefix, `publish` makes a sequence's full pages known. A page that nobody
uses but whose prefix is known keeps it until the page is needed; the one unused longest goes first.

    pages, known = allocator.match(tokens)               a new sequence: pages that others filled
    pages += allocator.allocate(count)                   pages of its own
    allocator.publish(tokens, pages)                     once their keys and values are written
    allocator.release(pages)                             when it ends

Only full pages are shared, so nobody ever writes to a page that another reads.
"""

import collections
from collections.abc import Iterable, Sequence

_ROOT = 0


class OutOfPagesError(RuntimeError):
    """Not enough free pages: the sequence must wait. Nothing was allocated."""


class PageAllocator:
    """Hands out the pages of a pool; not thread-safe.

    Args:
        num_pages: pages in the pool.
        page_size: tokens of a page.

    Raises:
        ValueError: for sizes below 1.
    """

    def __init__(self, num_pages: int, page_size: int):
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: got {size!r}, expected an int from 1 up")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages
        # A prefix is (the number of the prefix before its last page, that page's tokens): numbers
        # are never used twice, so a chain names its tokens exactly and no hash can collide.
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._prefix: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._number: dict[int, int] = {}
        self._next = _ROOT + 1
        self._unused: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out, those with a known prefix included."""
        return len(self._free) + len(self._unused)

    def users(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._users[page]

    def allocate(self, count: int = 1) -> list[int]:
        """Takes `count` pages, each with one user.

        Raises:
            OutOfPagesError: when fewer are free.
        """
        if count < 0:
            raise ValueError(f"count: got {count}, expected 0 or more")
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages asked for, {self.num_free} free")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                self._forget(page)
            self._users[page] = 1
            pages.append(page)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more user for each page, which must have one, or a known prefix."""
        pages = list(pages)
        for page in pages:
            if self._users[page] == 0 and page not in self._unused:
                raise ValueError(f"pages: got {page}, which is free")
        for page in pages:
            self._users[page] += 1
            self._unused.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """One user less for each page; the last one frees it.

        Raises:
            ValueError: for a page that has no user; nothing is released then.
        """
        pages = list(pages)
        for page, times in collections.Counter(pages).items():
            if not 0 <= page < self.num_pages or self._users[page] < times:
                raise ValueError(f"pages: got {page}, which has no user to release it")
        # Last pages first: what is evicted first should be the end of a prefix, not its beginning.
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._prefix:
                    self._unused[page] = None
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The pages that hold the longest known prefix of whole pages, with one more user each.

        Returns:
            the pages, and how many tokens they hold. Release them like allocated ones.
        """
        pages, number = [], _ROOT
        for key in self._keys(tokens):
            page = self._pages.get((number, key))
            if page is None:
                break
            pages.append(page)
            number = self._number[page]
        self.retain(pages)
        return pages, len(pages) * self.page_size

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Makes the prefix in a sequence's full pages known to `match`.

        Args:
            tokens: the sequence's tokens from its first on.
            pages: its pages in order; those that `tokens` does not fill are left alone.
        """
        number = _ROOT
        for key, page in zip(self._keys(tokens), pages, strict=False):
            if self._users[page] == 0:
                raise ValueError(f"pages: got {page}, which has no user")
            prefix = (number, key)
            known = self._pages.get(prefix)
            if known is None and page not in self._prefix:
                self._pages[prefix], self._prefix[page] = page, prefix
                self._number[page] = self._next
                self._next += 1
            # Another page may hold the same tokens already; the prefix goes on from that one.
            number = self._number[self._pages.get(prefix, page)]

    def _keys(self, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            yield tuple(map(int, tokens[start : start + self.page_size]))

    def _forget(self, page: int) -> None:
        """The page's prefix is no longer known, and longer ones that go on from it unreachable."""
        del self._pages[self._prefix.pop(page)]
        del self._number[page]


__all__ = ["OutOfPagesError", "PageAllocator"]
