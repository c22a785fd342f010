"""The page allocator: no page lost, none handed out twice, shared prefixes found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_attn as pa

SIZE = 3


def test_prefixes_are_stored_once():
    pages = pa.PageAllocator(8, SIZE)
    tokens = list(range(8))
    first = pages.allocate(3)
    pages.publish(tokens, first)
    shared, known = pages.match([*tokens[:6], 99, 98, 97])
    assert (shared, known) == (first[:2], 6)
    assert [pages.users(p) for p in first] == [2, 2, 1]
    pages.release(first)
    pages.release(shared)
    assert pages.num_free == 8
    # Still known, though nobody uses them; and gone once the pool is needed.
    again, known = pages.match(tokens)
    assert (again, known) == (first[:2], 6)
    pages.release(again)
    taken = pages.allocate(8)
    assert sorted(taken) == list(range(8))
    assert pages.match(tokens) == ([], 0)


def test_out_of_pages_changes_nothing():
    pages = pa.PageAllocator(2, SIZE)
    held = pages.allocate(1)
    with pytest.raises(pa.OutOfPagesError, match="2 pages asked for, 1 free"):
        pages.allocate(2)
    assert pages.num_free == 1
    with pytest.raises(ValueError, match="no user"):
        pages.release([held[0], held[0]])
    pages.release(held)
    with pytest.raises(ValueError, match="no user"):
        pages.release(held)
    with pytest.raises(ValueError, match="is free"):
        pages.retain([0])
    with pytest.raises(ValueError, match="num_pages: got 0"):
        pa.PageAllocator(0, 4)


def test_the_end_of_a_prefix_goes_first():
    pages = pa.PageAllocator(3, 1)
    held = pages.allocate(3)
    pages.publish([7, 8, 9], held)
    pages.release(held)
    pages.release(pages.allocate(1))
    assert pages.match([7, 8, 9]) == (held[:2], 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=10)), max_size=40)
)
def test_nothing_leaks(steps):
    """Random sequences come, grow, share and end; two users of a page always share a prefix."""
    pages = pa.PageAllocator(7, SIZE)
    alive = []
    for kind, tokens in steps:
        if kind == 0 and alive:
            pages.release(alive.pop(len(tokens) % len(alive))[1])
        else:
            held, known = pages.match(tokens)
            assert known == len(held) * SIZE <= len(tokens)
            try:
                held = held + pages.allocate(-(-len(tokens) // SIZE) - len(held))
            except pa.OutOfPagesError:
                pages.release(held)
                continue
            alive.append((tokens, held))
            if kind > 1:
                pages.publish(tokens, held)
        users = {}
        for tokens, held in alive:
            for i, page in enumerate(held):
                users.setdefault(page, []).append((i, tokens[: (i + 1) * SIZE]))
        assert pages.num_free == 7 - len(users)
        for page, prefixes in users.items():
            assert pages.users(page) == len(prefixes)
            assert all(p == prefixes[0] for p in prefixes)
    for _, held in alive:
        pages.release(held)
    assert pages.num_free == 7
