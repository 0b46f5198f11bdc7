"""The radix tree against a set of keys, and the order of eviction."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gapless.cache.eviction import EvictionOrder
from gapless.cache.radix import Node, RadixTree

PAGE_SIZE = 3

keys = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple), max_size=12)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def pages_for(index: int, length: int) -> list[int]:
    """Pages of the sequence `index`, named after it and their place."""
    return [100 * index + place for place in range(-(-length // PAGE_SIZE))]


@given(stored=keys, asked=st.lists(st.integers(0, 2), max_size=16).map(tuple))
def test_walk_finds_the_longest_common_prefix(
    stored: list[tuple[int, ...]], asked: tuple[int, ...]
) -> None:
    tree = RadixTree(PAGE_SIZE)
    for index, key in enumerate(stored):
        node = tree.insert(key, pages_for(index, len(key))).node
        assert node.end == len(key)
    walk = tree.walk(asked)
    assert walk.length == max((common(key, asked) for key in stored), default=0)
    ends = {node.end for node in walk.nodes}
    assert {len(key) for key in stored if asked[: len(key)] == key} <= ends
    assert all(end <= walk.length for end in ends)


@given(stored=keys)
def test_pages_of_a_key_hold_its_tokens(stored: list[tuple[int, ...]]) -> None:
    """A page belongs to a sequence that shares all tokens of the key up to the page's last one."""
    tree = RadixTree(PAGE_SIZE)
    held: list[int] = []
    nodes = []
    for index, key in enumerate(stored):
        inserted = tree.insert(key, pages_for(index, len(key)))
        nodes.append(inserted.node)
        held += inserted.pages
        for warmed in inserted.warmed:
            held += warmed.pages
    for key, node in zip(stored, nodes, strict=True):
        pages = tree.pages_of(node)
        assert len(pages) == -(-len(key) // PAGE_SIZE)
        for place, page in enumerate(pages):
            owner, own_place = stored[page // 100], page % 100
            end = min(len(key), (place + 1) * PAGE_SIZE)
            assert own_place == place
            assert common(owner, key) >= end
    assert sorted(held) == sorted(page for node in tree.nodes() for page in node.pages)


@given(stored=keys, data=st.data())
def test_removed_leaves_are_gone_and_nothing_else(
    stored: list[tuple[int, ...]], data: st.DataObject
) -> None:
    tree = RadixTree(PAGE_SIZE)
    for index, key in enumerate(stored):
        tree.insert(key, pages_for(index, len(key)))
    while tree.num_nodes:
        leaves = [node for node in tree.nodes() if not node.children]
        leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))]
        before = tree.num_nodes
        tree.cool_down(leaf)
        tree.remove(leaf)
        assert tree.num_nodes == before - 1 == len(list(tree.nodes()))
    assert tree.walk((0, 1)).length == 0


def make_nodes(count: int) -> list[Node]:
    return [Node(None, 0, [i], []) for i in range(count)]


def test_equal_worth_goes_in_order_of_use() -> None:
    nodes = make_nodes(3)
    order = EvictionOrder(lambda _node: 1.0)
    for node in nodes:
        order.add(node)
    order.add(nodes[0])
    assert [order.pop() for _ in range(4)] == [nodes[1], nodes[2], nodes[0], None]


def test_more_worth_stays_longer_but_not_for_ever() -> None:
    (dear, *cheap) = make_nodes(40)
    order = EvictionOrder(lambda node: 10.0 if node is dear else 1.0)
    order.add(dear)
    gone = []
    for node in cheap:
        order.add(node)
        gone.append(order.pop())
    assert dear in gone
    assert gone.index(dear) >= 9


def test_worth_that_has_grown_counts() -> None:
    first, second = make_nodes(2)
    worth = {first: 1.0, second: 2.0}
    order = EvictionOrder(lambda node: worth[node])
    order.add(first)
    order.add(second)
    worth[first] = 3.0
    assert order.pop() is second


def test_discarded_nodes_stay_and_the_heap_stays_small() -> None:
    nodes, rng = make_nodes(20), random.Random(0)
    order = EvictionOrder(lambda _node: 1.0)
    for _ in range(5000):
        order.add(rng.choice(nodes))
    assert len(order._heap) < 200
    for node in nodes[:15]:
        order.discard(node)
    assert len(order) == 5
    assert {order.pop() for _ in range(5)} == set(nodes[15:])
    assert order.pop() is None
