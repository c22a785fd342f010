"""Where in a kernel its spilled registers are touched: in no loop, in some loop, around matmuls.

Follows the jumps in what `nvdisasm -c` prints (its own graphs it draws for one form of ELF only).
Jumps backwards alone would tell nothing: ptxas moves the rare side of a branch behind the end of
the kernel, from where it jumps back.
"""

import dataclasses
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Graph:
    """One function: instructions of each basic block, and the blocks that may follow it."""

    blocks: dict[str, tuple[str, ...]]
    edges: dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Spills:
    """Bytes of local memory (LDL, STL) that one thread's code reads and writes, by place.

    Attributes:
        outside: in no loop.
        in_loops: in some loop, hot ones included; a persistent kernel loops over its tiles.
        in_hot_loops: in the innermost loops that hold matmuls; in all loops where none does.
    """

    outside: int = 0
    in_loops: int = 0
    in_hot_loops: int = 0


_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*)")
_JUMPS = ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "EXIT", "RET")


def graph_of(code: str) -> Graph:
    """The control flow of one function of `nvdisasm -c`."""
    blocks: dict[str, list[str]] = {"": []}
    edges: dict[str, list[str]] = {"": []}
    current = ""

    def enter(name: str, falls: bool) -> None:
        nonlocal current
        blocks[name], edges[name] = [], []
        if falls:
            edges[current].append(name)
        current = name

    falls = True
    for line in code.splitlines():
        if label := _LABEL.match(line):
            enter(label[1], falls)
            falls = True
        elif found := _INSTRUCTION.match(line):
            predicate, opcode, operands = found.groups()
            if blocks[current] and blocks[current][-1].split(".")[0] in _JUMPS:
                enter(f"{current}+", falls)
                falls = True
            blocks[current].append(opcode)
            if opcode.split(".")[0] in _JUMPS:
                edges[current] += re.findall(r"\.L\w+", operands)
                falls = bool(predicate or re.match(r"\s*!?U?P\d", operands))
    known = {name: tuple(to for to in after if to in blocks) for name, after in edges.items()}
    return Graph({name: tuple(opcodes) for name, opcodes in blocks.items()}, known)


def _components(nodes: set[str], edges: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected parts of a graph that are loops (Kosaraju's algorithm)."""
    back: dict[str, set[str]] = {node: set() for node in nodes}
    for node in nodes:
        for after in edges[node]:
            back[after].add(node)

    def visit(start: str, towards: dict[str, set[str]], seen: set[str]) -> list[str]:
        seen.add(start)
        done, stack = [], [(start, iter(towards[start]))]
        while stack:
            node, rest = stack[-1]
            step = next((x for x in rest if x not in seen), None)
            if step is None:
                done.append(node)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(towards[step])))
        return done

    order: list[str] = []
    seen: set[str] = set()
    for node in nodes:
        if node not in seen:
            order += visit(node, edges, seen)
    found, seen = [], set()
    for node in reversed(order):
        if node not in seen:
            found.append(set(visit(node, back, seen)))
    return [part for part in found if len(part) > 1 or part & edges[min(part)]]


def loops(graph: Graph) -> Iterator[frozenset[str]]:
    """Every loop as its blocks, each before those inside it."""
    waiting = [set(graph.blocks)]
    edges = {block: set(after) for block, after in graph.edges.items()}
    while waiting:
        nodes = waiting.pop()
        inner = {node: edges[node] & nodes for node in nodes}
        for part in _components(nodes, inner):
            yield frozenset(part)
            entered = {x for node in set(edges) - part for x in edges[node]} & part
            for node in part:  # cut open, so that what still goes round is a loop inside
                edges[node] -= entered or {min(part)}
            waiting.append(part)


def spills(graph: Graph) -> Spills:
    """Where a function touches local memory."""

    def has_matmul(blocks: frozenset[str]) -> bool:
        return any(re.match(r"[HQI]G?MMA\b", op) for b in blocks for op in graph.blocks[b])

    found = list(loops(graph))
    around = [loop for loop in found if has_matmul(loop)]
    hot = [loop for loop in around if not any(other < loop for other in around)] or found
    size = {name: sum(map(_local_bytes, code)) for name, code in graph.blocks.items()}
    looped, hottest = frozenset().union(*found), frozenset().union(*hot)
    return Spills(
        outside=sum(size[name] for name in set(graph.blocks) - looped),
        in_loops=sum(size[name] for name in looped),
        in_hot_loops=sum(size[name] for name in hottest),
    )


def _local_bytes(opcode: str) -> int:
    name, *modifiers = opcode.split(".")
    if name not in ("LDL", "STL"):
        return 0
    widths = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    return next((widths[m] for m in modifiers if m in widths), 4)
